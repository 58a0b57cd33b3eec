/**
 * A rollout server in JavaScript, with nothing but Node.js's standard library.
 *
 *     node server.mjs --model DIRECTORY [--address 127.0.0.1:8000]
 *
 * It computes a Qwen2 model, samples from it, and takes new weights: a run trains with it by
 * `rollout.addresses=[127.0.0.1:8000]`. README.md says what each file does.
 */

import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import path from "node:path";
import { parseArgs } from "node:util";

import { capabilityMissing, Generation } from "./generation.mjs";
import { FOREIGN_PROTOS, GrpcServer, RpcError } from "./grpc.mjs";
import { Schema } from "./protobuf.mjs";
import { asFloat32, Model, readConfig, readTensors } from "./qwen2.mjs";
import { Replica } from "./replica.mjs";
import { Weights } from "./weights.mjs";

const CONTRACT = "treadle.rollout.v1";
const HEALTH = "grpc.health.v1.Health";
const SERVED = ["GenerationService", "WeightSyncService", "ServerService"];
const CAPABILITIES = {
  sampled_logprobs: true,
  in_flight_continue: true,
  inline_transport: true,
  prompt_logprobs: true,
  generate_many: true,
};
const GRACE_MS = 10_000;

const { values: options } = parseArgs({
  options: {
    model: { type: "string" },
    address: { type: "string", default: "127.0.0.1:0" },
    "context-length": { type: "string" },
    "max-in-flight": { type: "string", default: "32" },
    "max-queued": { type: "string", default: "64" },
    "token-file": { type: "string" },
    protos: { type: "string", default: path.join(import.meta.dirname, "../../proto") },
    // For tests that start it: see docs/conformance.md.
    ready_file: { type: "string" },
    parent_pid: { type: "string" },
  },
});

/** Reads the contract. */
function contract(directory) {
  const folder = path.join(directory, ...CONTRACT.split("."));
  const files = readdirSync(folder).filter((name) => name.endsWith(".proto"));
  const sources = files.map((name) => readFileSync(path.join(folder, name), "utf8"));
  return new Schema([...FOREIGN_PROTOS, ...sources]);
}

/** Loads the model of a Hugging Face directory. */
function loadModel(directory, config) {
  const model = new Model(config);
  const tensors = readTensors(directory);
  const weights = Object.entries(model.shapes).map(([name, shape]) => {
    const found = tensors[name];
    if (!found?.elementType || `${found.shape}` !== `${shape}`) {
      const shown = found ? `${found.elementType} [${found.shape}]` : "absent";
      throw new Error(`${directory}: ${name} is ${shown}, expected [${shape}]`);
    }
    return [name, asFloat32(found.elementType, found.data)];
  });
  model.load(Object.fromEntries(weights));
  return model;
}

/** Returns the methods of ServerService. */
function serverHandlers(replica, weights, config, states) {
  const memory = async () => {
    throw capabilityMissing("release_memory");
  };
  return {
    GetServerInfo: async (call) => {
      await call.request();
      return {
        server_version: "example",
        engine: "node",
        engine_version: process.versions.node,
        capabilities: CAPABILITIES,
        model: {
          architecture: config.architecture,
          vocab_size: config.vocabSize,
          context_length: config.contextLength,
          tokenizer_sha256: config.tokenizerSha256,
          eos_token_ids: config.eos,
        },
        state: states[replica.state],
        weight_version: replica.engine.version,
        limits: {
          max_in_flight: Number(options["max-in-flight"]),
          max_queued: Number(options["max-queued"]),
        },
        num_workers: 1,
        load: { running: replica.engine.running, queued: replica.queued, ...replica.engine.counts },
      };
    },
    Pause: async (call) => {
      const policy = weights.policy((await call.request()).in_flight);
      await replica.pause(policy, call);
      return {};
    },
    Resume: async (call) => {
      await call.request();
      await replica.resume();
      return {};
    },
    ReleaseMemory: memory,
    RestoreMemory: memory,
  };
}

/** Returns the methods of the standard health service. */
function healthHandlers(replica, statuses) {
  const known = new Set(["", HEALTH, ...SERVED.map((name) => `${CONTRACT}.${name}`)]);
  const status = () =>
    ["SERVING", "PAUSED", "UPDATING"].includes(replica.state)
      ? statuses.SERVING
      : statuses.NOT_SERVING;
  return {
    Check: async (call) => {
      const { service } = await call.request();
      if (!known.has(service)) throw new RpcError("NOT_FOUND", "", `no service ${service}`);
      return { status: status() };
    },
    Watch: async (call) => {
      const { service } = await call.request();
      let told, forget;
      // Until the caller goes, or the server.
      await new Promise((resolve) => {
        const tell = () => {
          const now = known.has(service) ? status() : statuses.SERVICE_UNKNOWN;
          if (now !== told) call.write({ status: now });
          told = now;
          if (replica.state === "STOPPING") resolve();
        };
        forget = replica.watch(tell);
        call.whenGone(() => {
          forget();
          resolve();
        });
        tell();
      });
      forget();
    },
  };
}

/** Returns the methods of reflection: names only, since clients have the contract. */
function reflectionHandlers(names) {
  return {
    ServerReflectionInfo: async (call) => {
      for (let asked = await call.receive(); asked; asked = await call.receive()) {
        if (asked.list_services === undefined) {
          const text = "this server lists its services only";
          call.write({ error_response: { error_code: 12, error_message: text } });
        } else {
          call.write({ list_services_response: { service: names.map((name) => ({ name })) } });
        }
      }
    },
  };
}

async function main() {
  if (!options.model) throw new Error("--model DIRECTORY is missing");
  const [, host, port] = /^(.*):(\d+)$/.exec(options.address) ?? [];
  if (!["127.0.0.1", "localhost", "[::1]"].includes(host)) {
    // It has no TLS.
    throw new Error(`--address is ${options.address}, expected a port of 127.0.0.1`);
  }
  const contextLength = options["context-length"];
  const config = readConfig(options.model, contextLength && Number(contextLength));
  const schema = contract(options.protos);
  const model = loadModel(options.model, config);
  const replica = new Replica(model, {
    maxInFlight: Number(options["max-in-flight"]),
    maxQueued: Number(options["max-queued"]),
  });
  const tokenFile = options["token-file"];
  const grpc = new GrpcServer(schema, tokenFile && readFileSync(tokenFile, "utf8").trim());
  const weights = new Weights(replica, model.shapes, schema);
  const states = schema.enum(`${CONTRACT}.ServerState`);
  const statuses = schema.enum(`${HEALTH}CheckResponse.ServingStatus`);
  const services = {
    [`${CONTRACT}.GenerationService`]: new Generation(replica, config, schema).handlers(),
    [`${CONTRACT}.WeightSyncService`]: weights.handlers(),
    [`${CONTRACT}.ServerService`]: serverHandlers(replica, weights, config, states),
    [HEALTH]: healthHandlers(replica, statuses),
  };
  const reflection = reflectionHandlers(Object.keys(services));
  for (const version of ["v1", "v1alpha"]) {
    services[`grpc.reflection.${version}.ServerReflection`] = reflection;
  }
  for (const [name, handlers] of Object.entries(services)) grpc.add(name, handlers);
  const bound = await grpc.listen(host.replace(/[[\]]/g, ""), Number(port));
  const address = `${host}:${bound}`;
  if (options.ready_file) writeFileSync(options.ready_file, JSON.stringify({ address }));
  console.log(`serving ${config.architecture} at ${address}`);

  const stop = async () => {
    setTimeout(() => process.exit(1), 2 * GRACE_MS).unref(); // A caller holds its call open.
    await replica.stop(GRACE_MS);
    await grpc.close();
    process.exit(0);
  };
  process.once("SIGTERM", stop);
  process.once("SIGINT", stop);
  if (options.parent_pid) {
    setInterval(() => process.ppid === Number(options.parent_pid) || process.exit(1), 1000);
  }
}

main().catch((error) => {
  console.error(error.message);
  process.exit(2);
});
