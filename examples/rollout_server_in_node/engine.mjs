/**
 * Samples sequences side by side, one token of each in turn.
 *
 * Invariant: each token comes from one version of the weights, and so does each prompt: new weights
 * read a prompt again that they find half read. Everything happens on one thread. The loop gives
 * way to calls every few milliseconds, and weights change only while it is paused.
 */

import { setImmediate as giveWay } from "node:timers/promises";

import { draw, logprobOf, randomSeed } from "./qwen2.mjs";

const PROMPT_STEP = 32; // Tokens of a prompt that are read between two tokens of the others.
const LONGEST_MS = 5; // For which calls may wait.

export class Engine {
  #model;
  #sequences = new Set();
  #keptSince; // When a pause with CONTINUE began, if one lasts.
  #keptMs = 0;
  #looping = false;
  #whenIdle = [];
  #failed;

  /**
   * @param {import("./qwen2.mjs").Model} model
   * @param {(error: Error) => void} failed Called once, with what broke the engine.
   */
  constructor(model, failed) {
    this.#model = model;
    this.#failed = failed;
    this.version = 0n;
    this.counts = { started: 0n, finished: 0n, aborted: 0n };
  }

  /** How long sequences were kept without sampling, since the start. */
  get pausedMs() {
    return this.#keptMs + (this.#kept ? performance.now() - this.#keptSince : 0);
  }

  get running() {
    return this.#sequences.size;
  }

  /**
   * Starts a sequence.
   * @param {number[]} prompt
   * @param {object} settings A SamplingParams, with `max_tokens`.
   * @param {number} logprobsFrom The first id of the prompt whose log-probability is told, or
   *   Infinity.
   * @param {{prompt: Function, token: Function, finished: Function, failed: Function}} listener Is
   *   told log-probabilities of the prompt, if any (logprobs, version); each token (token, logprob,
   *   version); and how the sequence ended: a FinishReason's name, or an error.
   * @returns {() => void} Aborts the sequence; does nothing if it has ended.
   */
  start(prompt, settings, logprobsFrom, listener) {
    const stops = new Set(settings.stop_token_ids);
    if (!settings.ignore_eos) for (const id of this.#model.config.eos) stops.add(id);
    const sequence = {
      ids: [...prompt],
      promptLength: prompt.length,
      read: 0, // Ids whose keys and values are in the cache.
      logprobsFrom,
      promptLogprobs: [],
      cache: this.#model.cache(prompt.length + settings.max_tokens),
      seed: settings.seed ?? randomSeed(),
      settings,
      stops,
      listener,
    };
    this.#sequences.add(sequence);
    this.counts.started++;
    this.#loop();
    return () => {
      if (this.#remove(sequence)) this.counts.aborted++;
    };
  }

  /** Pauses by the contract's policy; returns when the sequences that it names have ended. */
  async pause(policy) {
    if (policy !== "CONTINUE") this.#unkeep();
    else this.#keptSince ??= performance.now();
    if (policy === "INTERRUPT") {
      for (const sequence of this.#sequences) this.#finish(sequence, "INTERRUPTED");
    }
    if (policy !== "DRAIN" || !this.running) return;
    this.#loop();
    await new Promise((resolve) => this.#whenIdle.push(resolve));
  }

  /** Samples what a pause has kept. */
  resume() {
    this.#unkeep();
    this.#loop();
  }

  /** Replaces the weights; only while paused. */
  load(weights, version) {
    this.#model.load(weights);
    this.version = version;
    for (const sequence of this.#sequences) {
      if (sequence.ids.length > sequence.promptLength) continue;
      sequence.read = 0;
      sequence.promptLogprobs = [];
    }
  }

  get #kept() {
    return this.#keptSince !== undefined;
  }

  #unkeep() {
    this.#keptMs = this.pausedMs;
    this.#keptSince = undefined;
  }

  async #loop() {
    if (this.#looping) return;
    this.#looping = true;
    await giveWay();
    try {
      for (let began = performance.now(); this.running && !this.#kept; ) {
        for (const sequence of this.#due()) {
          if (performance.now() - began > LONGEST_MS) {
            await giveWay();
            began = performance.now();
          }
          if (this.#kept) break;
          if (this.#sequences.has(sequence)) this.#step(sequence);
        }
        await giveWay();
      }
    } catch (error) {
      this.#fail(error);
    }
    this.#looping = false;
  }

  /** Returns the sequences of a round: one of those that read their prompt, and all others. */
  #due() {
    const all = [...this.#sequences];
    const first = all.find(unread);
    return all.filter((sequence) => sequence === first || !unread(sequence));
  }

  #step(sequence) {
    const { ids, cache } = sequence;
    if (unread(sequence)) {
      const until = Math.min(ids.length - 1, sequence.read + PROMPT_STEP);
      for (let at = sequence.read; at < until; at++) {
        const told = at + 1 >= sequence.logprobsFrom;
        const logits = this.#model.forward(ids[at], at, cache, told);
        if (told) sequence.promptLogprobs.push(logprobOf(logits, ids[at + 1]));
      }
      sequence.read = until;
      return;
    }
    if (sequence.promptLogprobs.length) {
      sequence.listener.prompt(sequence.promptLogprobs, this.version);
      sequence.promptLogprobs = [];
    }
    const logits = this.#model.forward(ids.at(-1), ids.length - 1, cache, true);
    const { token, logprob } = draw(logits, sequence.settings, sequence.seed, ids);
    sequence.read = ids.length;
    ids.push(token);
    sequence.listener.token(token, logprob, this.version);
    if (sequence.stops.has(token)) this.#finish(sequence, "STOP");
    else if (ids.length === sequence.promptLength + sequence.settings.max_tokens) {
      this.#finish(sequence, "LENGTH");
    }
  }

  #finish(sequence, reason) {
    this.#remove(sequence);
    this.counts.finished++;
    sequence.listener.finished(reason);
  }

  #fail(error) {
    this.#failed(error);
    for (const sequence of this.#sequences) {
      this.#remove(sequence);
      this.counts.aborted++;
      sequence.listener.failed(error);
    }
  }

  #remove(sequence) {
    const removed = this.#sequences.delete(sequence);
    if (!this.running) for (const resolve of this.#whenIdle.splice(0)) resolve();
    return removed;
  }
}

function unread(sequence) {
  return sequence.read < sequence.ids.length - 1;
}
