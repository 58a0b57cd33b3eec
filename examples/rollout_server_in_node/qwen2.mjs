/**
 * A Qwen2 language model in plain JavaScript: weights, forward pass and sampler.
 *
 * Invariant: weights are replaced as a whole, and a token depends only on its logits, its settings,
 * its seed and its position. Weights and caches are float32, sums float64.
 *
 * Model: https://arxiv.org/abs/2407.10671, with the names and layouts of transformers' Qwen2.
 */

import { createHash, randomBytes } from "node:crypto";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import path from "node:path";

/** Safetensors' names of element types -> names of the contract's ElementType. */
const STORED = { F32: "FLOAT32", BF16: "BFLOAT16", F16: "FLOAT16" };
/** Bytes of an element, by the contract's names. */
export const ELEMENT_BYTES = { FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2 };

/** Returns what a Hugging Face directory says of a model, as the contract's ModelInfo, and more. */
export function readConfig(directory, contextLength) {
  const config = readJson(path.join(directory, "config.json"));
  const rope = config.rope_parameters ?? { rope_theta: config.rope_theta };
  const computed = { model_type: "qwen2", hidden_act: "silu", use_sliding_window: false };
  const found = { ...config, rope_type: rope.rope_type ?? "default" };
  for (const [key, value] of Object.entries({ ...computed, rope_type: "default" })) {
    const shown = found[key] ?? value;
    if (shown !== value) throw new Error(`${directory}: ${key} is ${shown}, expected ${value}`);
  }
  for (const key of ["hidden_size", "intermediate_size"]) {
    if (config[key] % 4) throw new Error(`${directory}: ${key} is not a multiple of 4`);
  }
  const generation = path.join(directory, "generation_config.json");
  const eos = (existsSync(generation) ? readJson(generation) : config).eos_token_id;
  const tokenizer = path.join(directory, "tokenizer.json");
  const longest = config.max_position_embeddings;
  if (contextLength > longest) {
    throw new Error(`--context-length is ${contextLength}, the model has at most ${longest}`);
  }
  return {
    architecture: config.architectures[0],
    vocabSize: config.vocab_size,
    contextLength: contextLength ?? longest,
    eos: eos === undefined || eos === null ? [] : [eos].flat(),
    tokenizerSha256: existsSync(tokenizer)
      ? createHash("sha256").update(readFileSync(tokenizer)).digest()
      : Buffer.alloc(0),
    numLayers: config.num_hidden_layers,
    hidden: config.hidden_size,
    intermediate: config.intermediate_size,
    heads: config.num_attention_heads,
    kvHeads: config.num_key_value_heads,
    headDim: config.hidden_size / config.num_attention_heads,
    eps: config.rms_norm_eps,
    theta: rope.rope_theta,
    tied: config.tie_word_embeddings,
  };
}

/** Returns the tensors of the model: name -> shape. */
export function parameters(config) {
  const { hidden, intermediate, vocabSize } = config;
  const kv = config.kvHeads * config.headDim;
  const shapes = {};
  shapes["model.embed_tokens.weight"] = [vocabSize, hidden];
  shapes["model.norm.weight"] = [hidden];
  if (!config.tied) shapes["lm_head.weight"] = [vocabSize, hidden];
  for (let layer = 0; layer < config.numLayers; layer++) {
    const prefix = `model.layers.${layer}`;
    shapes[`${prefix}.input_layernorm.weight`] = [hidden];
    shapes[`${prefix}.post_attention_layernorm.weight`] = [hidden];
    for (const [name, rows] of [["q", hidden], ["k", kv], ["v", kv]]) {
      shapes[`${prefix}.self_attn.${name}_proj.weight`] = [rows, hidden];
      shapes[`${prefix}.self_attn.${name}_proj.bias`] = [rows];
    }
    shapes[`${prefix}.self_attn.o_proj.weight`] = [hidden, hidden];
    shapes[`${prefix}.mlp.gate_proj.weight`] = [intermediate, hidden];
    shapes[`${prefix}.mlp.up_proj.weight`] = [intermediate, hidden];
    shapes[`${prefix}.mlp.down_proj.weight`] = [hidden, intermediate];
  }
  return shapes;
}

/** Returns the tensors of a directory's safetensors files: name -> {elementType, shape, data}. */
export function readTensors(directory) {
  const found = {};
  for (const file of readdirSync(directory).filter((name) => name.endsWith(".safetensors"))) {
    const bytes = readFileSync(path.join(directory, file));
    const start = 8 + Number(bytes.readBigUInt64LE());
    const header = JSON.parse(bytes.subarray(8, start).toString());
    for (const [name, { dtype, shape, data_offsets: [from, to] = [] }] of Object.entries(header)) {
      if (name === "__metadata__") continue;
      const data = bytes.subarray(start + from, start + to);
      found[name] = { elementType: STORED[dtype], shape, data };
    }
  }
  return found;
}

/** Returns little-endian bytes as float32. */
export function asFloat32(elementType, data) {
  const count = data.length / ELEMENT_BYTES[elementType];
  const view = new DataView(data.buffer, data.byteOffset, data.length);
  const values = new Float32Array(count);
  if (elementType === "FLOAT32") {
    for (let i = 0; i < count; i++) values[i] = view.getFloat32(4 * i, true);
  } else if (elementType === "BFLOAT16") {
    const bits = new Uint32Array(values.buffer);
    for (let i = 0; i < count; i++) bits[i] = view.getUint16(2 * i, true) << 16;
  } else {
    for (let i = 0; i < count; i++) values[i] = half(view.getUint16(2 * i, true));
  }
  return values;
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (!exponent) return sign * fraction * 2 ** -24;
  if (exponent === 0x1f) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** The model. A sequence's keys and values live in the cache that `cache` makes for it. */
export class Model {
  #weights = {};
  #layers = [];

  constructor(config) {
    this.config = config;
    this.shapes = parameters(config);
    const half = config.headDim / 2;
    const positions = Array.from({ length: config.contextLength }, (_, at) => at);
    const angles = positions.flatMap((at) =>
      Array.from({ length: half }, (_, i) => at * config.theta ** (-i / half)),
    );
    this.cos = Float32Array.from(angles, Math.cos);
    this.sin = Float32Array.from(angles, Math.sin);
  }

  /** Replaces all weights: name -> Float32Array. */
  load(weights) {
    this.#weights = weights;
    this.#layers = Array.from({ length: this.config.numLayers }, (_, layer) => {
      const of = (name) => weights[`model.layers.${layer}.${name}`];
      return {
        norm: of("input_layernorm.weight"),
        q: of("self_attn.q_proj.weight"),
        k: of("self_attn.k_proj.weight"),
        v: of("self_attn.v_proj.weight"),
        qBias: of("self_attn.q_proj.bias"),
        kBias: of("self_attn.k_proj.bias"),
        vBias: of("self_attn.v_proj.bias"),
        o: of("self_attn.o_proj.weight"),
        norm2: of("post_attention_layernorm.weight"),
        gate: of("mlp.gate_proj.weight"),
        up: of("mlp.up_proj.weight"),
        down: of("mlp.down_proj.weight"),
      };
    });
  }

  /** Returns an empty cache for a sequence of at most `length` tokens. */
  cache(length) {
    const size = length * this.config.kvHeads * this.config.headDim;
    return Array.from({ length: this.config.numLayers }, () => ({
      keys: new Float32Array(size),
      values: new Float32Array(size),
    }));
  }

  /**
   * Reads one token at a position, after all tokens before it.
   * @returns {Float32Array | undefined} The logits, if `wanted`.
   */
  forward(token, position, cache, wanted) {
    const { hidden, heads, kvHeads, headDim, eps } = this.config;
    const embedding = this.#weights["model.embed_tokens.weight"];
    const x = Float32Array.from(embedding.subarray(token * hidden, (token + 1) * hidden));
    const width = kvHeads * headDim;
    this.#layers.forEach((layer, index) => {
      const { keys, values } = cache[index];
      const normed = rmsNorm(x, layer.norm, eps);
      const q = multiply(layer.q, normed, layer.qBias);
      const k = keys.subarray(position * width, (position + 1) * width);
      k.set(multiply(layer.k, normed, layer.kBias));
      values.set(multiply(layer.v, normed, layer.vBias), position * width);
      this.#rotate(q, heads, position);
      this.#rotate(k, kvHeads, position);
      add(x, multiply(layer.o, this.#attend(q, keys, values, position)));
      const again = rmsNorm(x, layer.norm2, eps);
      const gate = multiply(layer.gate, again);
      const up = multiply(layer.up, again);
      for (let i = 0; i < gate.length; i++) gate[i] *= up[i] / (1 + Math.exp(-gate[i]));
      add(x, multiply(layer.down, gate));
    });
    if (!wanted) return undefined;
    const head = this.#weights[this.config.tied ? "model.embed_tokens.weight" : "lm_head.weight"];
    return multiply(head, rmsNorm(x, this.#weights["model.norm.weight"], eps));
  }

  #rotate(vector, heads, position) {
    const { headDim } = this.config;
    const half = headDim / 2;
    for (let head = 0; head < heads; head++) {
      for (let i = 0; i < half; i++) {
        const cos = this.cos[position * half + i];
        const sin = this.sin[position * half + i];
        const low = head * headDim + i;
        const a = vector[low];
        const b = vector[low + half];
        vector[low] = a * cos - b * sin;
        vector[low + half] = b * cos + a * sin;
      }
    }
  }

  #attend(q, keys, values, position) {
    const { heads, kvHeads, headDim } = this.config;
    const width = kvHeads * headDim;
    const out = new Float32Array(heads * headDim);
    const weights = new Float64Array(position + 1);
    for (let head = 0; head < heads; head++) {
      const from = head * headDim;
      const shared = Math.floor((head * kvHeads) / heads) * headDim;
      let largest = -Infinity;
      for (let at = 0, key = shared; at <= position; at++, key += width) {
        let even = 0;
        let odd = 0;
        for (let i = 0; i < headDim; i += 2) {
          even += q[from + i] * keys[key + i];
          odd += q[from + i + 1] * keys[key + i + 1];
        }
        weights[at] = (even + odd) / Math.sqrt(headDim);
        if (weights[at] > largest) largest = weights[at];
      }
      let total = 0;
      for (let at = 0; at <= position; at++) {
        weights[at] = Math.exp(weights[at] - largest);
        total += weights[at];
      }
      for (let at = 0, value = shared; at <= position; at++, value += width) {
        const share = weights[at] / total;
        for (let i = 0; i < headDim; i++) out[from + i] += share * values[value + i];
      }
    }
    return out;
  }
}

function rmsNorm(x, weight, eps) {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += x[i] * x[i];
  const scale = 1 / Math.sqrt(sum / x.length + eps);
  return weight.map((w, i) => w * x[i] * scale);
}

/** Returns a matrix of rows, times a vector, plus a bias. The width is a multiple of 4. */
function multiply(matrix, x, bias) {
  const width = x.length;
  const out = new Float32Array(matrix.length / width);
  for (let row = 0, at = 0; row < out.length; row++) {
    // Four sums, because each addition would wait for the one before it.
    let a = bias ? bias[row] : 0;
    let b = 0;
    let c = 0;
    let d = 0;
    for (let i = 0; i < width; i += 4, at += 4) {
      a += matrix[at] * x[i];
      b += matrix[at + 1] * x[i + 1];
      c += matrix[at + 2] * x[i + 2];
      d += matrix[at + 3] * x[i + 3];
    }
    out[row] = a + b + (c + d);
  }
  return out;
}

function add(x, y) {
  for (let i = 0; i < x.length; i++) x[i] += y[i];
}

/** Returns a seed for a sequence that came without one. */
export function randomSeed() {
  return randomBytes(8).readBigUInt64LE();
}

/**
 * Draws a token. In this order: repetition penalty, temperature, top-k, top-p, min-p.
 *
 * @param {Float32Array} logits Overwritten.
 * @param {object} settings A SamplingParams; fields that were not sent are undefined.
 * @param {bigint} seed
 * @param {number[]} history The ids before the token, prompt first.
 * @returns {{token: number, logprob: number}} The log-probability in nats, of the distribution
 *   that was drawn from.
 */
export function draw(logits, settings, seed, history) {
  const penalty = settings.repetition_penalty ?? 1;
  if (penalty !== 1) {
    for (const id of new Set(history)) logits[id] *= logits[id] > 0 ? 1 / penalty : penalty;
  }
  let best = 0;
  for (let id = 1; id < logits.length; id++) if (logits[id] > logits[best]) best = id;
  if (!Number.isFinite(logits[best])) throw new Error("the logits are not finite: broken weights");
  const temperature = settings.temperature ?? 1;
  if (temperature === 0) return { token: best, logprob: 0 };
  const weights = Float64Array.from(logits, (x) => Math.exp((x - logits[best]) / temperature));
  let ids = Array.from(weights.keys());
  const { top_k: topK, top_p: topP = 1, min_p: minP = 0 } = settings;
  if (topK !== undefined || topP < 1 || minP > 0) {
    ids.sort((a, b) => weights[b] - weights[a] || a - b);
    ids = ids.slice(0, topK);
    const total = sum(ids, weights);
    let before = 0;
    ids = ids.filter((id, rank) => {
      const kept = !rank || ((topP === 1 || before / total < topP) && weights[id] >= minP);
      before += weights[id];
      return kept;
    });
    ids.sort((a, b) => a - b);
  }
  const total = sum(ids, weights);
  let left = uniform(seed, history.length) * total;
  const token = ids.find((id) => (left -= weights[id]) < 0) ?? best;
  return { token, logprob: Math.min(0, Math.log(weights[token] / total)) };
}

/** Returns the log-probability of an id in nats, at temperature 1 over the whole vocabulary. */
export function logprobOf(logits, id) {
  const largest = logits.reduce((a, b) => Math.max(a, b));
  const total = logits.reduce((before, x) => before + Math.exp(x - largest), 0);
  return logits[id] - largest - Math.log(total);
}

function sum(ids, weights) {
  return ids.reduce((total, id) => total + weights[id], 0);
}

/** Returns output `position` of SplitMix64(seed), as a number in [0, 1): no state to keep. */
function uniform(seed, position) {
  const cut = (value) => BigInt.asUintN(64, value);
  let z = cut(seed + BigInt(position + 1) * 0x9e3779b97f4a7c15n);
  z = cut((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n);
  z = cut((z ^ (z >> 27n)) * 0x94d049bb133111ebn);
  z ^= z >> 31n;
  return Number(z >> 16n) / 2 ** 48;
}

function readJson(file) {
  return JSON.parse(readFileSync(file, "utf8"));
}
