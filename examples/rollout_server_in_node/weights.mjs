/**
 * WeightSyncService: staged updates over the inline transport.
 *
 * Invariant: at most one update is live. It holds every byte before its commit, and the old version
 * serves until then. How the last updates ended is remembered, because calls are repeated when an
 * answer gets lost: see the table in docs/protocol.md.
 */

import { crc32 } from "node:zlib";

import { capabilityMissing, checkText } from "./generation.mjs";
import { duration, invalidField, RpcError } from "./grpc.mjs";
import { asFloat32, ELEMENT_BYTES } from "./qwen2.mjs";

const MAX_CHUNK_BYTES = 1 << 20;
const MAX_LEASE_MS = 3_600_000;
const MAX_TENSORS_NAMED = 500; // In an error; a status travels in headers.
const REMEMBERED = 16;

/** One version of the weights on its way. */
class Update {
  /**
   * @param {{id: string, version: bigint, leaseMs: number, tensors: object[]}} announced With the
   *   tensors' `name`, `elementType`, `shape` and `size` in bytes.
   */
  constructor(announced) {
    Object.assign(this, announced);
    this.received = this.tensors.map(() => 0);
    this.data = this.tensors.map((tensor) => Buffer.alloc(tensor.size));
    this.commit = undefined; // The promise of its version, once it is being committed.
    this.renew();
  }

  get sizes() {
    return this.tensors.map((tensor) => tensor.size);
  }

  get leaseLeftMs() {
    return this.commit ? this.leaseMs : this.leaseEnd - performance.now();
  }

  renew() {
    this.leaseEnd = performance.now() + this.leaseMs;
  }

  /** Whether another Begin announces the same. */
  repeats(announced) {
    const shown = ({ version, tensors }) => JSON.stringify([String(version), tensors]);
    return shown(announced) === shown(this);
  }

  /** Takes a WeightChunk. */
  accept({ tensor_index: index, offset, crc32: announced, data }) {
    if (data.length > MAX_CHUNK_BYTES) {
      throw invalidField("chunk.data", `${data.length} bytes`, `1 to ${MAX_CHUNK_BYTES} bytes`);
    }
    if (index >= this.tensors.length) {
      throw invalidField("tensor_index", index, `below ${this.tensors.length}`);
    }
    const held = this.received[index];
    if (offset !== BigInt(held)) {
      const text = `a chunk of tensor ${index} starts at byte ${offset}: resume from ${held}`;
      const detail = { tensor_index: index, expected_offset: BigInt(held) };
      throw new RpcError("OUT_OF_RANGE", "CHUNK_OUT_OF_ORDER", text, [
        ["treadle.rollout.v1.ChunkOutOfOrder", detail],
      ]);
    }
    const left = this.tensors[index].size - held;
    if (data.length < 1 || data.length > left) {
      throw invalidField("data", `${data.length} bytes`, `1 to the ${left} bytes that are missing`);
    }
    const computed = crc32(data);
    if (computed !== announced) {
      const text = `a chunk of tensor ${index} has CRC-32 ${computed}, announced ${announced}`;
      throw new RpcError("DATA_LOSS", "CHUNK_CORRUPT", `${text}: send it again`);
    }
    this.data[index].set(data, held);
    this.received[index] += data.length;
    this.renew();
  }
}

/** Serves the methods of WeightSyncService. */
export class Weights {
  #replica;
  #shapes;
  #elementTypes;
  #policies;
  #live;
  #committed;
  #ended = new Map(); // Id -> {how, version}, of the last updates.
  #timer;

  /**
   * @param {import("./replica.mjs").Replica} replica
   * @param {Object<string, number[]>} shapes Of the model's tensors.
   * @param {import("./protobuf.mjs").Schema} schema
   */
  constructor(replica, shapes, schema) {
    this.#replica = replica;
    this.#shapes = shapes;
    this.#elementTypes = byNumber(schema.enum("treadle.rollout.v1.ElementType"));
    this.#policies = byNumber(schema.enum("treadle.rollout.v1.InFlightPolicy"));
  }

  handlers() {
    return {
      BeginUpdate: async (call) => this.#begin(await call.request()),
      PushWeights: (call) => this.#push(call),
      PushBuckets: async () => {
        throw capabilityMissing("shared_memory_transport");
      },
      GetUpdate: async (call) => {
        const update = this.#find((await call.request()).update_id);
        return { received_bytes: update.received.map(BigInt) };
      },
      CommitUpdate: async (call) => {
        const { update_id: id, in_flight: policy } = await call.request();
        return { weight_version: await this.#commit(id, policy) };
      },
      AbortUpdate: async (call) => {
        this.#abort((await call.request()).update_id);
        return {};
      },
    };
  }

  /** Returns the policy that a request names. */
  policy(value, field = "in_flight") {
    const found = this.#policies.get(value);
    if (found && found !== "UNSPECIFIED") return found;
    throw invalidField(field, value, "DRAIN (1), INTERRUPT (2) or CONTINUE (3)");
  }

  #begin(request) {
    const announced = this.#announced(request);
    this.#checkTensors(announced.tensors);
    this.#dropLate();
    const { id, version, leaseMs, tensors } = announced;
    const same = (update) => update?.id === id && update.version === version;
    const known = [this.#live, this.#committed].find(same);
    const serving = this.#replica.engine.version;
    if (!known && version <= serving) {
      const text = `version ${serving} serves, ${version} is not newer: the trainer is behind`;
      throw new RpcError("FAILED_PRECONDITION", "WEIGHT_VERSION_BEHIND", text, [
        ["treadle.rollout.v1.WeightVersionBehind", { serving, wanted: version }],
      ]);
    }
    if (!known && !this.#live) {
      this.#ended.delete(id);
      this.#live = new Update({ id, version, leaseMs, tensors });
      this.#watch();
      return begun(this.#live.received);
    }
    const update = known ?? this.#live;
    if (update.id !== id) {
      const left = update.leaseLeftMs;
      const text = `update ${update.id} holds the server for ${left} ms: abort it or wait`;
      const detail = { update_id: update.id, lease_left: duration(left) };
      throw new RpcError("ABORTED", "UPDATE_IN_PROGRESS", text, [
        ["treadle.rollout.v1.UpdateInProgress", detail],
      ]);
    }
    if (!update.repeats(announced)) {
      throw invalidField("update_id", id, "a new id: this one announced other tensors");
    }
    update.renew();
    return begun(update === this.#live ? update.received : update.sizes);
  }

  /** Returns what a BeginUpdateRequest announces. */
  #announced(request) {
    if (!request.tensors.length) {
      throw invalidField("tensors", "empty", "every tensor of the model");
    }
    const tensors = request.tensors.map((spec, index) => {
      const elementType = this.#elementTypes.get(spec.element_type);
      if (!(elementType in ELEMENT_BYTES)) {
        const expected = Object.keys(ELEMENT_BYTES).join(", ");
        throw invalidField(`tensors[${index}].element_type`, spec.element_type, expected);
      }
      const shape = spec.shape.map(Number);
      const size = shape.reduce((product, n) => product * n, ELEMENT_BYTES[elementType]);
      return { name: spec.name, elementType, shape, size };
    });
    for (const transport of ["file", "collective", "shared_memory"]) {
      if (request[transport]) throw capabilityMissing(`${transport}_transport`);
    }
    if (!request.inline) throw invalidField("transport", "unset", "inline");
    if (request.in_place) throw capabilityMissing("in_place_update");
    if (request.delta || request.keep_base) throw capabilityMissing("delta_encoding");
    checkText("update_id", request.update_id, 1);
    const { lease } = request;
    const leaseMs = lease ? Number(lease.seconds) * 1000 + lease.nanos / 1e6 : 0;
    if (leaseMs <= 0 || leaseMs > MAX_LEASE_MS) {
      throw invalidField("lease", `${leaseMs} ms`, `above 0 and at most ${MAX_LEASE_MS} ms`);
    }
    return { id: request.update_id, version: request.weight_version, leaseMs, tensors };
  }

  /** Checks that tensors are those of the model, each once; the element type is free. */
  #checkTensors(tensors) {
    const missing = new Set(Object.keys(this.#shapes));
    for (const { name, elementType, shape } of tensors) {
      const held = this.#shapes[name];
      const expected = held ? `[${held}]` : "absent";
      const received = `${elementType} [${shape}]`;
      if (`[${shape}]` !== expected) throw tensorMismatch(name, expected, received);
      if (!missing.delete(name)) throw tensorMismatch(name, "it once", "announced twice");
    }
    for (const name of missing) throw tensorMismatch(name, `[${this.#shapes[name]}]`, "absent");
  }

  async #push(call) {
    const { header } = (await call.receive()) ?? {};
    if (!header) throw invalidField("payload", "no header", "a header as the first message");
    let receivedBytes = 0n;
    this.#find(header.update_id);
    for (let message = await call.receive(); message; message = await call.receive()) {
      if (!message.chunk) throw invalidField("payload", "no chunk", "chunks after the header");
      this.#find(header.update_id).accept(message.chunk);
      receivedBytes += BigInt(message.chunk.data.length);
    }
    return { received_bytes: receivedBytes };
  }

  #commit(id, policyNumber) {
    const ended = this.#ended.get(id);
    if (ended?.how === "was committed") return ended.version;
    const update = this.#find(id);
    if (update.commit) return update.commit;
    const policy = this.policy(policyNumber);
    const lacking = update.sizes.flatMap((size, i) => (update.received[i] < size ? [i] : []));
    if (lacking.length) {
      const text = `${lacking.length} tensors lack bytes: push the rest`;
      const detail = { tensor_indices: lacking.slice(0, MAX_TENSORS_NAMED) };
      throw new RpcError("FAILED_PRECONDITION", "UPDATE_INCOMPLETE", text, [
        ["treadle.rollout.v1.UpdateIncomplete", detail],
      ]);
    }
    // It runs to its end, also when its callers give up.
    update.commit = this.#replica.exclusive(() => this.#switch(update, policy));
    update.commit.catch(() => {
      update.commit = undefined;
      update.renew();
    });
    return update.commit;
  }

  /** Makes the engine sample from an update; returns its version. */
  async #switch(update, policy) {
    const replica = this.#replica;
    const before = replica.state;
    replica.move("UPDATING");
    await replica.engine.pause(policy);
    replica.check(); // It may have failed, or the server stops.
    const weights = update.tensors.map(({ name, elementType }, i) => [
      name,
      asFloat32(elementType, update.data[i]),
    ]);
    replica.engine.load(Object.fromEntries(weights), update.version);
    update.data = [];
    this.#committed = update;
    this.#end("was committed");
    if (before === "PAUSED") {
      replica.move("PAUSED");
      replica.rejectWaiting(replica.notServing());
    } else replica.goOn();
    return update.version;
  }

  #abort(id) {
    const how = this.#ended.get(id)?.how;
    if (how === "was aborted") return;
    if (how === "was committed" || (this.#live?.id === id && this.#live.commit)) {
      const text = `the commit of ${id} runs to its end: call CommitUpdate to learn it`;
      throw new RpcError("FAILED_PRECONDITION", "STATE_CONFLICT", text);
    }
    this.#find(id);
    this.#end("was aborted");
  }

  /** Returns the live update, its lease renewed. */
  #find(id) {
    checkText("update_id", id, 1);
    this.#dropLate();
    if (this.#live?.id === id) {
      this.#live.renew();
      return this.#live;
    }
    const how = this.#ended.get(id)?.how ?? "was never begun";
    throw new RpcError("NOT_FOUND", "UPDATE_UNKNOWN", `update ${id} ${how}: begin again`);
  }

  /** Drops an update whose lease has run out, whether or not anybody calls. */
  #watch() {
    clearTimeout(this.#timer);
    this.#dropLate();
    if (this.#live) this.#timer = setTimeout(() => this.#watch(), this.#live.leaseLeftMs + 1);
  }

  #dropLate() {
    if (this.#live && this.#live.leaseLeftMs <= 0) this.#end("ran out of its lease");
  }

  #end(how) {
    const { id, version } = this.#live;
    this.#live = undefined;
    clearTimeout(this.#timer);
    this.#ended.delete(id);
    this.#ended.set(id, { how, version });
    if (this.#ended.size > REMEMBERED) this.#ended.delete(this.#ended.keys().next().value);
  }
}

function begun(received) {
  return { received_bytes: received.map(BigInt), max_chunk_bytes: MAX_CHUNK_BYTES };
}

function tensorMismatch(name, expected, received) {
  const text = `tensor ${name} is ${received}, expected ${expected}`;
  return new RpcError("FAILED_PRECONDITION", "TENSOR_MISMATCH", text, [
    ["treadle.rollout.v1.TensorMismatch", { name: name.slice(0, 200), expected, received }],
  ]);
}

function byNumber(names) {
  return new Map(Object.entries(names).map(([name, number]) => [number, name]));
}
