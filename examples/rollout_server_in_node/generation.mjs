/**
 * GenerationService: one completion per call, or many.
 *
 * Invariant: a stream is one `started`, chunks of tokens, one `finished`, or it fails. The tokens
 * of a chunk are of one version. However a call ends, its sequence leaves the engine.
 */

import {
  after,
  Cancelled,
  Caller,
  deadlineRequired,
  duration,
  EXPIRED,
  invalidField,
  RpcError,
  statusOf,
} from "./grpc.mjs";

const MAX_ID_BYTES = 128;
const CHUNK_TOKENS = 32;
const CHUNK_MS = 500;
const MESSAGE_PARTS = 1000; // Of at most 400 bytes each.

const minimum = (least) => [(x) => x >= least, `at least ${least}`];
const RANGES = {
  max_tokens: minimum(1),
  temperature: [(x) => x >= 0 && x < Infinity, "a finite number of at least 0"],
  top_p: [(x) => x > 0 && x <= 1, "in (0, 1]"],
  top_k: [(x) => x >= 1, "at least 1; unset for the whole vocabulary"],
  min_p: [(x) => x >= 0 && x <= 1, "in [0, 1]"],
  repetition_penalty: [(x) => x > 0 && x < Infinity, "a finite number above 0"],
};

/** Returns the error for a call that needs what this server cannot do. */
export function capabilityMissing(capability) {
  const text = `this server lacks ${capability}: read GetServerInfoResponse.capabilities first`;
  return new RpcError("UNIMPLEMENTED", "CAPABILITY_MISSING", text);
}

/** Checks the length of a text in bytes of UTF-8. */
export function checkText(field, text, least) {
  const size = Buffer.byteLength(text);
  if (size >= least && size <= MAX_ID_BYTES) return;
  throw invalidField(field, `${size} bytes long`, `${least} to ${MAX_ID_BYTES} bytes`);
}

function checkIds(field, ids, vocabSize) {
  const index = ids.findIndex((id) => id >= vocabSize);
  if (index < 0) return;
  throw invalidField(`${field}[${index}]`, ids[index], `below the vocabulary's ${vocabSize}`);
}

/** Checks a GenerateRequest; returns its sampling, with `max_tokens` cut to the context. */
function checkRequest(request, { vocabSize, contextLength }, modes) {
  checkText("request_id", request.request_id, 1);
  checkText("session_id", request.session_id, 0);
  const prompt = request.prompt_token_ids;
  if (prompt.length >= contextLength) {
    const text = `the prompt has ${prompt.length} tokens, the context holds ${contextLength}`;
    const detail = { prompt_tokens: prompt.length, context_length: contextLength };
    throw new RpcError("INVALID_ARGUMENT", "PROMPT_TOO_LONG", text, [
      ["treadle.rollout.v1.PromptTooLong", detail],
    ]);
  }
  if (!prompt.length) throw invalidField("prompt_token_ids", "empty", "at least one token id");
  checkIds("prompt_token_ids", prompt, vocabSize);
  if (![modes.NONE, modes.SAMPLED].includes(request.logprob_mode)) {
    throw invalidField("logprob_mode", request.logprob_mode, "NONE (1) or SAMPLED (2)");
  }
  if (request.priority) throw capabilityMissing("priority");
  if (request.images.length) throw capabilityMissing("images");
  if (request.routed_experts_from !== undefined) throw capabilityMissing("routed_experts");
  const from = request.prompt_logprobs_from;
  if (from !== undefined && (from < 1 || from > prompt.length)) {
    throw invalidField("prompt_logprobs_from", from, `1 to the prompt's ${prompt.length}`);
  }
  if (request.sampling_mask) throw capabilityMissing("sampling_mask");
  if (request.constraint) throw capabilityMissing("constrained_sampling");
  const sampling = request.sampling ?? {};
  for (const [name, [accepts, expected]] of Object.entries(RANGES)) {
    const value = sampling[name];
    if (value !== undefined && !accepts(value)) {
      throw invalidField(`sampling.${name}`, value, expected);
    }
  }
  const most = sampling.max_tokens;
  if (most === undefined) throw invalidField("sampling.max_tokens", "unset", "at least 1");
  const stops = sampling.stop_token_ids;
  if (stops.length > vocabSize) {
    const received = `${stops.length} values`;
    throw invalidField("sampling.stop_token_ids", received, `at most ${vocabSize}`);
  }
  checkIds("sampling.stop_token_ids", stops, vocabSize);
  return { ...sampling, max_tokens: Math.min(most, contextLength - prompt.length) };
}

/** Collects the events of a completion into messages. */
class Events {
  #send;
  #batched;
  #waiting = [];
  #chunk;
  #timer;
  #any = false;

  constructor(send, batched) {
    this.#send = send;
    this.#batched = batched;
  }

  add(name, event) {
    this.#waiting.push([name, event]);
    if (!this.#batched) this.flush();
  }

  token(token, logprob, version) {
    if (this.#chunk && this.#chunk.weight_version !== version) this.flush();
    this.#chunk ??= { token_ids: [], logprobs: [], weight_version: version };
    this.#chunk.token_ids.push(token);
    if (logprob !== undefined) this.#chunk.logprobs.push(logprob);
    if (!this.#any || this.#chunk.token_ids.length === CHUNK_TOKENS) this.flush();
    else this.#timer ??= setTimeout(() => this.flush(), CHUNK_MS);
    this.#any = true;
  }

  /** Sends what there is. */
  flush() {
    this.stop();
    const events = this.#waiting;
    if (this.#chunk) {
      const ended = events.at(-1)?.[0] === "finished";
      events.splice(ended ? -1 : events.length, 0, ["tokens", this.#chunk]);
    }
    [this.#waiting, this.#chunk] = [[], undefined];
    if (events.length > 1 && this.#batched) {
      const { tokens, prompt_logprobs: prompt, ...others } = Object.fromEntries(events);
      const batch = { ...others, tokens: tokens && [tokens], prompt_logprobs: prompt && [prompt] };
      this.#send({ batch });
    } else for (const [name, event] of events) this.#send({ [name]: event });
  }

  stop() {
    clearTimeout(this.#timer);
    this.#timer = undefined;
  }
}

/** Collects the parts of many completions: what is ready together shares a message. */
class Outbox {
  #call;
  #parts = [];

  constructor(call) {
    this.#call = call;
  }

  add(part) {
    if (!this.#parts.length) setImmediate(() => this.flush());
    this.#parts.push(part);
  }

  flush() {
    while (this.#parts.length && !this.#call.gone) {
      this.#call.write({ parts: this.#parts.splice(0, MESSAGE_PARTS) });
    }
  }
}

/** Serves the methods of GenerationService. */
export class Generation {
  #replica;
  #config;
  #schema;
  #modes;
  #reasons;

  constructor(replica, config, schema) {
    this.#schema = schema;
    this.#replica = replica;
    this.#config = config;
    this.#modes = schema.enum("treadle.rollout.v1.LogprobMode");
    this.#reasons = schema.enum("treadle.rollout.v1.FinishReason");
  }

  handlers() {
    return {
      Generate: async (call) => {
        await this.#complete(await call.request(), (message) => call.write(message), call);
      },
      GenerateMany: (call) => this.#many(call),
    };
  }

  async #many(call) {
    const outbox = new Outbox(call);
    const running = new Map(); // Number -> caller, of the completions that have no status yet.
    const completions = new Set();
    call.whenGone(() => {
      for (const caller of running.values()) caller.leave();
    });
    try {
      for (let message = await this.#next(call); message; message = await this.#next(call)) {
        for (const wanted of message.begin) {
          if (running.has(wanted.number)) {
            const expected = "a number that no running completion has";
            throw invalidField("begin.number", wanted.number, expected);
          }
          const caller = new Caller();
          running.set(wanted.number, caller);
          const completion = this.#numbered(wanted, caller, outbox).finally(() => {
            running.delete(wanted.number);
            completions.delete(completion);
          });
          completions.add(completion);
        }
        for (const number of message.cancel) running.get(number)?.leave();
      }
      await Promise.all(completions);
      outbox.flush();
    } finally {
      for (const caller of running.values()) caller.leave();
    }
  }

  /** Returns the next message of a shared call; none once the server shuts down. */
  async #next(call) {
    let forget;
    const stopping = new Promise((resolve) => {
      const look = () => this.#replica.state === "STOPPING" && resolve();
      forget = this.#replica.watch(look);
      look();
    });
    try {
      return await Promise.race([stopping, call.receive()]);
    } finally {
      forget();
    }
  }

  /** Runs one of many completions; its status comes last, and not after a cancellation. */
  async #numbered({ number, request, timeout }, caller, outbox) {
    let timer;
    let expired = false;
    let status = {};
    try {
      if (!timeout) throw deadlineRequired("a completion of GenerateMany");
      const expire = () => {
        expired = true;
        caller.leave();
      };
      timer = after(Number(timeout.seconds) * 1000 + timeout.nanos / 1e6, expire);
      const wanted = request ?? this.#schema.decode("treadle.rollout.v1.GenerateRequest", []);
      await this.#complete(wanted, (response) => outbox.add({ number, response }), caller);
    } catch (error) {
      status = expired ? EXPIRED : statusOf(this.#schema, error);
    }
    clearTimeout(timer);
    if (!caller.gone || expired) outbox.add({ number, status });
  }

  /** Runs one completion to its end. */
  async #complete(request, send, caller) {
    const replica = this.#replica;
    const settings = checkRequest(request, this.#config, this.#modes);
    if (replica.state !== "UPDATING") this.#checkVersion(request.min_weight_version);
    const events = new Events(send, request.batched);
    try {
      await this.#sample(request, settings, events, caller);
    } finally {
      events.stop();
      replica.fill();
    }
  }

  #sample(request, settings, events, caller) {
    const { engine } = this.#replica;
    const told = request.logprob_mode === this.#modes.SAMPLED;
    const arrived = performance.now();
    return new Promise((resolve, reject) => {
      let numTokens = 0;
      let abort = () => {};
      let began, pausedMs, prefillMs;
      const listener = {
        prompt: (logprobs, version) =>
          events.add("prompt_logprobs", { logprobs, weight_version: version }),
        token: (token, logprob, version) => {
          numTokens++;
          prefillMs ??= performance.now() - began;
          events.token(token, told ? logprob : undefined, version);
        },
        finished: (reason) => {
          const ms = performance.now() - began;
          events.add("finished", {
            reason: this.#reasons[reason],
            num_tokens: numTokens,
            engine_time: duration(ms),
            prefill_time: duration(prefillMs ?? ms),
            paused_time: duration(engine.pausedMs - pausedMs),
          });
          events.flush();
          resolve();
        },
        failed: () => reject(this.#replica.failure),
      };
      const begin = () => {
        this.#checkVersion(request.min_weight_version);
        began = performance.now();
        pausedMs = engine.pausedMs;
        events.add("started", { cached_prompt_tokens: 0, queue_time: duration(began - arrived) });
        const { prompt_token_ids: prompt, prompt_logprobs_from: from = Infinity } = request;
        abort = engine.start(prompt, settings, from, listener);
      };
      const leave = this.#replica.admit(begin, reject);
      caller.whenGone(() => {
        leave();
        abort();
        reject(new Cancelled());
      });
    });
  }

  #checkVersion(wanted) {
    const serving = this.#replica.engine.version;
    if (wanted <= serving) return;
    const text = `version ${serving} serves, ${wanted} is wanted: commit the newer weights first`;
    throw new RpcError("FAILED_PRECONDITION", "WEIGHT_VERSION_BEHIND", text, [
      ["treadle.rollout.v1.WeightVersionBehind", { serving, wanted }],
    ]);
  }
}
