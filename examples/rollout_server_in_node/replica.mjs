/**
 * What the services share: the server's state, the queue of completions, and the engine.
 *
 * Invariant: a completion is refused or it runs. One that waits when the server pauses or stops is
 * refused, because it can still run on another server. While weights change, completions wait.
 */

import { Engine } from "./engine.mjs";
import { duration, RpcError } from "./grpc.mjs";

const RETRY_MS = 100;

export class Replica {
  #limits;
  #waiting = new Set();
  #control = Promise.resolve();
  #watchers = new Set();

  /**
   * @param {import("./qwen2.mjs").Model} model
   * @param {{maxInFlight: number, maxQueued: number}} limits
   */
  constructor(model, limits) {
    this.#limits = limits;
    this.engine = new Engine(model, (error) => this.#fail(error));
    this.state = "SERVING";
    this.failure = undefined; // What calls get once the engine has failed.
  }

  /** Number of completions that wait. */
  get queued() {
    return this.#waiting.size;
  }

  /** Calls `watcher` after each change of state; returns what forgets it. */
  watch(watcher) {
    this.#watchers.add(watcher);
    return () => this.#watchers.delete(watcher);
  }

  /** Changes the state; a server that stops or has failed does not come back. */
  move(state) {
    if (this.state === "STOPPING" || (this.state === "FAILED" && state !== "STOPPING")) return;
    this.state = state;
    for (const watcher of this.#watchers) watcher();
  }

  /** Throws if the engine has failed or the server is stopping. */
  check() {
    if (this.failure) throw this.failure;
    if (this.state === "STOPPING") {
      const text = "the server is shutting down: use another replica";
      throw new RpcError("UNAVAILABLE", "SHUTTING_DOWN", text);
    }
  }

  notServing() {
    const text = `the server is ${this.state.toLowerCase()}: retry in ${RETRY_MS} ms or elsewhere`;
    return new RpcError("UNAVAILABLE", "PAUSED", text, [retryInfo()]);
  }

  /**
   * Calls `begin` when there is a slot: now, or later unless the completion leaves the queue.
   * @param {() => void} begin Starts the sequence; what it throws later goes to `reject`.
   * @param {(error: Error) => void} reject Called if the server pauses or fails meanwhile.
   * @returns {() => void} Leaves the queue. Throws if there is no place in it.
   */
  admit(begin, reject) {
    this.check();
    if (this.state !== "SERVING" && this.state !== "UPDATING") throw this.notServing();
    const { maxInFlight, maxQueued } = this.#limits;
    if (this.state === "SERVING" && !this.queued && this.engine.running < maxInFlight) {
      begin();
      return () => {};
    }
    if (this.queued >= maxQueued) {
      const text = `${this.engine.running} completions run and ${this.queued} wait, the maximum`;
      throw new RpcError("RESOURCE_EXHAUSTED", "OVERLOADED", text, [retryInfo()]);
    }
    const turn = { begin, reject };
    this.#waiting.add(turn);
    return () => this.#waiting.delete(turn);
  }

  /** Lets completions run that wait; call it when one has ended. */
  fill() {
    for (const turn of this.#waiting) {
      if (this.state !== "SERVING" || this.engine.running >= this.#limits.maxInFlight) return;
      this.#waiting.delete(turn);
      try {
        turn.begin();
      } catch (error) {
        turn.reject(error);
      }
    }
  }

  /** Refuses all completions that wait. */
  rejectWaiting(error) {
    for (const turn of this.#waiting) turn.reject(error);
    this.#waiting.clear();
  }

  /** Runs `action` when no other one runs: pauses, resumes and commits exclude one another. */
  async exclusive(action) {
    const before = this.#control;
    let release;
    this.#control = new Promise((resolve) => (release = resolve));
    await before;
    try {
      this.check();
      return await action();
    } finally {
      release();
    }
  }

  /** Pauses; serves as before if the caller leaves while sequences are drained. */
  pause(policy, caller) {
    return this.exclusive(async () => {
      const before = this.state;
      this.move("PAUSED");
      this.rejectWaiting(this.notServing());
      const gone = new Promise((resolve) => caller.whenGone(resolve));
      await Promise.race([this.engine.pause(policy), gone]);
      if (caller.gone && before === "SERVING") this.goOn();
    });
  }

  resume() {
    return this.exclusive(async () => this.goOn());
  }

  /** Serves, and samples what a pause has kept. */
  goOn() {
    this.move("SERVING");
    this.engine.resume();
    this.fill();
  }

  /** Ends what can end, within `graceMs`. */
  async stop(graceMs) {
    this.move("STOPPING");
    this.rejectWaiting(new RpcError("UNAVAILABLE", "SHUTTING_DOWN", "the server is shutting down"));
    const late = new Promise((resolve) => setTimeout(resolve, graceMs).unref());
    await Promise.race([this.engine.pause("DRAIN"), late]);
    await this.engine.pause("INTERRUPT");
  }

  #fail(error) {
    console.error("the engine failed:", error);
    const text = `the engine failed: ${error.message}`;
    this.failure = new RpcError("INTERNAL", "ENGINE_FAILED", text);
    this.move("FAILED");
    this.rejectWaiting(this.failure);
  }
}

function retryInfo() {
  return ["google.rpc.RetryInfo", { retry_delay: duration(RETRY_MS) }];
}
