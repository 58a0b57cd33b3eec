/**
 * The metrics of each run, read in increments: a feed asks for what was appended since its cursor.
 * A log that was rewritten, as a resumed run does, begins anew.
 */

import { get } from "./api.js";

/** @typedef {Record<string, number | null>} Line */

export class MetricFeed {
  /** @param {number} run Its index. */
  constructor(run) {
    this.run = run;
    /** @type {Line[]} */
    this.lines = [];
    this.damaged = 0;
    this.cursor = "0-0";
    /** @type {Promise<boolean> | null} */
    this.reading = null;
  }

  /** Reads what is new; returns whether anything was. Two calls at once read once. */
  read() {
    this.reading ??= this.#read().finally(() => (this.reading = null));
    return this.reading;
  }

  async #read() {
    let changed = false;
    for (;;) {
      const found = await get(`runs/${this.run}/metrics`, { cursor: this.cursor });
      if (found.restarted) [this.lines, this.damaged] = [[], 0];
      changed ||= found.restarted || found.lines.length > 0 || found.damaged > 0;
      this.lines.push(...found.lines);
      this.damaged += found.damaged;
      this.cursor = found.cursor;
      if (!found.more) return changed;
    }
  }

  /** Names of all metrics, sorted. */
  names() {
    const names = new Set(this.lines.flatMap(Object.keys));
    names.delete("step");
    return [...names].sort();
  }

  /**
   * @param {string} name
   * @param {"step" | "hours"} axis
   * @returns {{x: number[], y: (number | null)[]}} The lines that have the metric.
   */
  series(name, axis = "step") {
    const x = [];
    const y = [];
    let elapsed = 0;
    for (const line of this.lines) {
      elapsed += line["time/step_s"] ?? line["time/validate_s"] ?? 0;
      if (!(name in line)) continue;
      x.push(axis === "step" ? (line.step ?? 0) : elapsed / 3600);
      y.push(line[name]);
    }
    return { x, y };
  }

  /** The last number of a metric. @param {string} name */
  last(name) {
    const { x, y } = this.series(name);
    for (let i = y.length - 1; i >= 0; i--) if (y[i] !== null) return { step: x[i], value: y[i] };
    return null;
  }
}

/**
 * Exponential moving average, debiased, so that its first value is the first of the series.
 * @param {(number | null)[]} values
 * @param {number} weight Of what came before, from 0 to 1.
 */
export function smooth(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}
