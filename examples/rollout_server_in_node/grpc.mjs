/**
 * A gRPC server over node:http2, without TLS.
 *
 * Invariant: each call ends with exactly one status. A handler runs only for a caller with the
 * right token and a deadline, and nothing is decoded before these checks.
 *
 * Protocol: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
 */

import { timingSafeEqual } from "node:crypto";
import http2 from "node:http2";

import { DecodeError } from "./protobuf.mjs";

const STATUS = {
  OK: 0,
  CANCELLED: 1,
  INVALID_ARGUMENT: 3,
  DEADLINE_EXCEEDED: 4,
  NOT_FOUND: 5,
  RESOURCE_EXHAUSTED: 8,
  FAILED_PRECONDITION: 9,
  ABORTED: 10,
  OUT_OF_RANGE: 11,
  UNIMPLEMENTED: 12,
  INTERNAL: 13,
  UNAVAILABLE: 14,
  DATA_LOSS: 15,
  UNAUTHENTICATED: 16,
};
const UNITS_MS = { H: 3_600_000, M: 60_000, S: 1000, m: 1, u: 1e-3, n: 1e-6 };
const MAX_MESSAGE_BYTES = 4 << 20;
const MAX_HELD = 4; // Messages of a stream that wait for their handler.
const MAX_TIMER_MS = 2 ** 31 - 1; // setTimeout takes no more.
const MAX_TEXT = 1000; // A status travels in headers, which clients limit to 8 KiB.
const DOMAIN = "treadle.rollout.v1";
const OURS = "/treadle.rollout.";
const OPEN = "/grpc.health.v1.Health/";
const HEADERS = { ":status": 200, "content-type": "application/grpc" };

/** What the contract's files do not define. */
export const FOREIGN_PROTOS = [
  `syntax = "proto3"; package google.protobuf;
   message Duration { int64 seconds = 1; int32 nanos = 2; }
   message Any { string type_url = 1; bytes value = 2; }`,
  `syntax = "proto3"; package google.rpc;
   message Status { int32 code = 1; string message = 2; repeated google.protobuf.Any details = 3; }
   message ErrorInfo { string reason = 1; string domain = 2; }
   message RetryInfo { google.protobuf.Duration retry_delay = 1; }`,
  `syntax = "proto3"; package grpc.health.v1;
   message HealthCheckRequest { string service = 1; }
   message HealthCheckResponse {
     enum ServingStatus { UNKNOWN = 0; SERVING = 1; NOT_SERVING = 2; SERVICE_UNKNOWN = 3; }
     ServingStatus status = 1;
   }
   service Health {
     rpc Check(HealthCheckRequest) returns (HealthCheckResponse);
     rpc Watch(HealthCheckRequest) returns (stream HealthCheckResponse);
   }`,
  ...["v1", "v1alpha"].map(
    (version) => `syntax = "proto3"; package grpc.reflection.${version};
   message ServerReflectionRequest { oneof message_request { string list_services = 7; } }
   message ServerReflectionResponse {
     oneof message_response {
       ListServiceResponse list_services_response = 6;
       ErrorResponse error_response = 7;
     }
   }
   message ListServiceResponse { repeated ServiceResponse service = 1; }
   message ServiceResponse { string name = 1; }
   message ErrorResponse { int32 error_code = 1; string error_message = 2; }
   service ServerReflection {
     rpc ServerReflectionInfo(stream ServerReflectionRequest)
         returns (stream ServerReflectionResponse);
   }`,
  ),
];

/** Ends a call with a status; of the contract if it has a reason (errors.proto). */
export class RpcError extends Error {
  /**
   * @param {string} code Name of the gRPC status.
   * @param {string} reason An ErrorReason without its prefix; "" outside the contract.
   * @param {string} text Cause, value and fix.
   * @param {[string, object][]} details Names of messages, and their content.
   */
  constructor(code, reason, text, details = []) {
    super(text);
    this.code = code;
    this.reason = reason;
    this.details = details;
  }
}

/** The caller has gone, or its deadline has passed. */
export class Cancelled extends Error {}

/** Calls `callback` after some time, of any length; returns the timer. */
export function after(milliseconds, callback) {
  return setTimeout(callback, Math.min(milliseconds, MAX_TIMER_MS));
}

/** Returns a google.protobuf.Duration. */
export function duration(milliseconds) {
  const nanos = Math.max(0, Math.round(milliseconds * 1e6));
  return { seconds: BigInt(Math.floor(nanos / 1e9)), nanos: nanos % 1e9 };
}

/** Returns the error for a request's field that holds a value that is not accepted. */
export function invalidField(field, received, expected) {
  const shown = String(received).slice(0, 200);
  const text = `${field} is ${shown}, expected ${expected}`;
  return new RpcError("INVALID_ARGUMENT", "INVALID_FIELD", text, [
    ["treadle.rollout.v1.InvalidField", { field, received: shown, expected }],
  ]);
}

/** The messages of a request, in order; at most a few are held. */
class Inbox {
  #stream;
  #parts = [];
  #held = 0;
  #wanted = 5;
  #inMessage = false;
  #ready = [];
  #error;
  #wake = () => {};

  constructor(stream) {
    this.#stream = stream;
    this.ended = false;
    stream.on("data", (part) => this.#take(part));
    stream.on("end", () => {
      this.ended = true;
      if (this.#held || this.#inMessage) this.fail(new Cancelled());
      this.#wake();
    });
  }

  /** Makes `next` throw. */
  fail(error) {
    this.#error ??= error;
    this.#wake();
  }

  /** Returns the bytes of the next message, or undefined after the last one. */
  async next() {
    while (!this.#ready.length && !this.ended && !this.#error) {
      await new Promise((resolve) => (this.#wake = resolve));
    }
    if (this.#ready.length < MAX_HELD) this.#stream.resume();
    if (!this.#ready.length && this.#error) throw this.#error;
    return this.#ready.shift();
  }

  #take(part) {
    if (this.#error) return;
    this.#parts.push(part);
    this.#held += part.length;
    while (this.#held >= this.#wanted) {
      const bytes = this.#parts.length === 1 ? this.#parts[0] : Buffer.concat(this.#parts);
      const rest = bytes.subarray(this.#wanted);
      this.#parts = rest.length ? [rest] : [];
      this.#held = rest.length;
      if (this.#inMessage) {
        this.#ready.push(bytes.subarray(0, this.#wanted));
        [this.#inMessage, this.#wanted] = [false, 5];
        continue;
      }
      [this.#inMessage, this.#wanted] = [true, bytes.readUInt32BE(1)];
      if (bytes[0]) {
        this.fail(new RpcError("UNIMPLEMENTED", "", "compressed messages are not read"));
      } else if (this.#wanted > MAX_MESSAGE_BYTES) {
        const text = `a message of ${this.#wanted} bytes, at most ${MAX_MESSAGE_BYTES}`;
        this.fail(new RpcError("RESOURCE_EXHAUSTED", "", text));
      }
      if (this.#error) return;
    }
    if (this.#ready.length >= MAX_HELD) this.#stream.pause();
    if (this.#ready.length) this.#wake();
  }
}

/** Who waits for an answer; `gone` once nobody waits any more. */
export class Caller {
  #whenGone = new Set();
  gone = false;

  /** Calls `callback` when the caller goes or its deadline passes. */
  whenGone(callback) {
    if (this.gone) callback();
    else this.#whenGone.add(callback);
  }

  leave() {
    if (this.gone) return;
    this.gone = true;
    for (const callback of this.#whenGone) callback();
  }

  /** Ends the wait: the answer is complete. */
  served() {
    this.gone = true;
    this.#whenGone.clear();
  }
}

/** One call, as its handler sees it. */
class Call extends Caller {
  #schema;
  #stream;
  #method;
  #inbox;
  #trailers = {};
  #timer;
  #ended = false;

  constructor(schema, stream, method, deadlineMs) {
    super();
    this.#schema = schema;
    this.#stream = stream;
    this.#method = method;
    this.#inbox = new Inbox(stream);
    this.whenGone(() => {
      clearTimeout(this.#timer);
      this.#inbox.fail(new Cancelled());
    });
    stream.on("wantTrailers", () => {
      stream.sendTrailers(this.#trailers);
      this.#stopCaller();
    });
    stream.on("error", () => {}); // "close" follows.
    stream.on("close", () => this.leave());
    if (deadlineMs !== undefined) {
      const passed = () => {
        this.leave();
        this.end(EXPIRED);
      };
      this.#timer = after(deadlineMs, passed);
    }
  }

  /** Returns the only message of a call. */
  async request() {
    const message = await this.receive();
    if (message) return message;
    throw invalidField("request", "absent", `a ${this.#method.request}`);
  }

  /** Returns the next message, or undefined after the last one. */
  async receive() {
    const bytes = await this.#inbox.next();
    if (bytes === undefined) return undefined;
    try {
      return this.#schema.decode(this.#method.request, bytes);
    } catch (error) {
      if (!(error instanceof DecodeError)) throw error;
      const expected = `a serialized ${this.#method.request} (${error.message})`;
      throw invalidField("request", `${bytes.length} bytes that do not parse`, expected);
    }
  }

  /** Sends a message. */
  write(message) {
    if (this.gone) throw new Cancelled();
    const stream = this.#stream;
    if (!stream.headersSent) stream.respond(HEADERS, { waitForTrailers: true });
    const content = this.#schema.encode(this.#method.response, message);
    const frame = Buffer.alloc(5 + content.length);
    frame.writeUInt32BE(content.length, 1);
    frame.set(content, 5);
    stream.write(frame);
  }

  /** Ends the call with a status; only the first one counts. */
  end({ code, message = "", details }) {
    if (this.#ended) return;
    this.#ended = true;
    clearTimeout(this.#timer);
    this.served();
    const stream = this.#stream;
    if (stream.closed || stream.destroyed) return;
    this.#trailers = { "grpc-status": String(code) };
    if (message) this.#trailers["grpc-message"] = percentEncoded(message);
    if (details) this.#trailers["grpc-status-details-bin"] = details.toString("base64");
    if (stream.headersSent) stream.end();
    else {
      stream.respond({ ...HEADERS, ...this.#trailers }, { endStream: true });
      this.#stopCaller();
    }
    this.#inbox.fail(new Cancelled());
    stream.resume();
  }

  /** Tells a caller that still writes to stop, after the status has gone out. */
  #stopCaller() {
    setImmediate(() => {
      if (!this.#inbox.ended) this.#stream.close(http2.constants.NGHTTP2_NO_ERROR);
    });
  }
}

/** Serves methods of a schema. */
export class GrpcServer {
  #schema;
  #token;
  #methods = new Map();
  #sessions = new Set();
  #server;

  /**
   * @param {import("./protobuf.mjs").Schema} schema
   * @param {string | undefined} token Bearer token that callers must send.
   */
  constructor(schema, token) {
    this.#schema = schema;
    this.#token = token === undefined ? undefined : Buffer.from(`Bearer ${token}`);
    // Weights arrive over one connection; the default window is 64 KiB.
    const settings = { initialWindowSize: MAX_MESSAGE_BYTES };
    this.#server = http2.createServer({ settings, maxSessionMemory: 64 });
    this.#server.on("session", (session) => {
      session.setLocalWindowSize(2 * MAX_MESSAGE_BYTES);
      this.#sessions.add(session);
      session.on("close", () => this.#sessions.delete(session));
      session.on("error", () => {}); // Its streams close, and end their calls.
    });
    this.#server.on("stream", (stream, headers) => this.#serve(stream, headers));
  }

  /**
   * Adds a service.
   * @param {string} name Full name of the service.
   * @param {Object<string, (call: Call) => Promise<object | undefined>>} handlers By method; each
   *   writes to the call, and returns a last message or undefined.
   */
  add(name, handlers) {
    for (const [method, types] of Object.entries(this.#schema.service(name))) {
      this.#methods.set(`/${name}/${method}`, { ...types, handler: handlers[method] });
    }
  }

  /** Listens; returns the port. */
  listen(host, port) {
    return new Promise((resolve, reject) => {
      this.#server.once("error", reject);
      this.#server.listen(port, host, () => resolve(this.#server.address().port));
    });
  }

  /** Accepts no more calls; returns when the running ones have ended. */
  async close() {
    const closed = new Promise((resolve) => this.#server.close(resolve));
    for (const session of this.#sessions) session.close();
    await closed;
  }

  async #serve(stream, headers) {
    const path = headers[":path"];
    const method = this.#methods.get(path) ?? {};
    const deadlineMs = timeoutMs(headers["grpc-timeout"]);
    const call = new Call(this.#schema, stream, method, deadlineMs);
    try {
      if (!path.startsWith(OPEN)) this.#authenticate(headers.authorization);
      if (path.startsWith(OURS) && deadlineMs === undefined) throw deadlineRequired(path);
      if (!method.handler) {
        throw new RpcError("UNIMPLEMENTED", "", `this server does not implement ${path}`);
      }
      const last = await method.handler(call);
      if (last !== undefined) call.write(last);
      call.end({ code: STATUS.OK });
    } catch (error) {
      call.end(statusOf(this.#schema, error));
    }
  }

  #authenticate(shown) {
    if (this.#token === undefined) return;
    const given = Buffer.from(shown ?? "");
    if (given.length === this.#token.length && timingSafeEqual(given, this.#token)) return;
    const problem = shown === undefined ? "carries no token" : "carries a wrong token";
    const text = `the call ${problem}: send metadata 'authorization: Bearer <token>'`;
    throw new RpcError("UNAUTHENTICATED", "UNAUTHENTICATED", text);
  }
}

/** The status of a call whose deadline has passed. */
export const EXPIRED = { code: STATUS.DEADLINE_EXCEEDED, message: "the deadline has passed" };

/**
 * Returns the status of a call that failed.
 * @returns {{code: number, message: string, details: Buffer | undefined}} Details are those of an
 *   error of the contract, as a google.rpc.Status.
 */
export function statusOf(schema, error) {
  if (error instanceof Cancelled) return { code: STATUS.CANCELLED, message: "the caller has gone" };
  if (!(error instanceof RpcError)) {
    console.error("a bug:", error);
    return { code: STATUS.INTERNAL, message: "a bug of the server, whose log has the trace" };
  }
  const code = STATUS[error.code];
  const message = error.message.slice(0, MAX_TEXT);
  if (!error.reason) return { code, message };
  const info = ["google.rpc.ErrorInfo", { reason: error.reason, domain: DOMAIN }];
  const details = [info, ...error.details].map(([name, content]) => ({
    type_url: `type.googleapis.com/${name}`,
    value: schema.encode(name, content),
  }));
  return { code, message, details: schema.encode("google.rpc.Status", { code, message, details }) };
}

/** Returns the error for a call or a completion without a deadline. */
export function deadlineRequired(path) {
  const text = `${path} needs a deadline: set a timeout`;
  return new RpcError("INVALID_ARGUMENT", "DEADLINE_REQUIRED", text);
}

function timeoutMs(header) {
  const found = /^(\d{1,8})([HMSmun])$/.exec(header ?? "");
  return found ? Number(found[1]) * UNITS_MS[found[2]] : undefined;
}

function percentEncoded(text) {
  return text.replace(/[^ -$&-~]/gu, (character) =>
    [...Buffer.from(character)].map((byte) => `%${byte.toString(16).padStart(2, "0")}`).join(""),
  );
}
