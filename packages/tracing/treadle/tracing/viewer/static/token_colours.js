/** The colour of a token: by a value of it on a scale, or by what it is. */

import { colour, el, fill } from "./dom.js";
import { number, signed } from "./format.js";

/**
 * @typedef {{id: number, piece: string | null, span: any, at: number, logprob: number | null,
 *   entropy: number | null, mismatch: number | null, advantage: number | null}} Token
 * @typedef {{label: string, of: (t: Token) => number | null, diverging?: boolean, least?: number}} Mode
 * @typedef {((t: Token) => string) & {mean: (ts: Token[]) => string}} Paint Returns a background.
 */

/** @type {Record<string, Mode>} */
export const MODES = {
  logprob: {
    label: "log-probability",
    of: (t) => (t.logprob === null ? null : -t.logprob),
    least: 2,
  },
  entropy: { label: "entropy", of: (t) => t.entropy, least: 1 },
  mismatch: {
    label: "engine/trainer mismatch",
    of: (t) => t.mismatch,
    diverging: true,
    least: 1e-3,
  },
  advantage: { label: "advantage", of: (t) => t.advantage, diverging: true, least: 1e-3 },
};
const SCALE_QUANTILE = 0.99;
const MAX_ALPHA = 0.72;
/**
 * Returns what gives a token its background, and shows the scale.
 * @param {string} name
 * @param {Token[]} all
 * @param {HTMLElement} legend
 * @returns {Paint}
 */
export function painter(name, all, legend) {
  const mode = MODES[name];
  if (!mode) return categories(name, all, legend);
  const sizes = all
    .map(mode.of)
    .filter((v) => v !== null)
    .map(Math.abs)
    .sort((a, b) => a - b);
  const most = Math.max(
    mode.least ?? 0,
    sizes[Math.floor((sizes.length - 1) * SCALE_QUANTILE)] ?? 0,
  );
  const [plus, minus] = mode.diverging
    ? [colour("good"), colour("bad")]
    : [colour("heat"), colour("heat")];
  const shade = (/** @type {number} */ value) =>
    translucent(value < 0 ? minus : plus, Math.min(1, Math.abs(value) / most) * MAX_ALPHA);
  const ends = mode.diverging ? [-most, most] : [0, most];
  const sign = name === "logprob" ? -1 : 1;
  fill(
    legend,
    el("span", null, mode.diverging ? signed(ends[0]) : number(0)),
    el("i", {
      style: {
        background: `linear-gradient(90deg, ${shade(ends[0])}, ${shade(0)}${mode.diverging ? "" : " 0%"}, ${shade(ends[1])})`,
      },
    }),
    el("span", null, mode.diverging ? signed(ends[1]) : number(sign * most)),
  );
  /** @param {Token} token */
  const paint = (token) => {
    const value = mode.of(token);
    return value === null ? "" : shade(value);
  };
  paint.mean = (/** @type {Token[]} */ members) => {
    const values = members.map(mode.of).filter((v) => v !== null);
    return values.length ? shade(values.reduce((a, b) => a + b, 0) / values.length) : "";
  };
  return paint;
}

/** @param {string} name @param {Token[]} all @param {HTMLElement} legend */
function categories(name, all, legend) {
  const of = (/** @type {Token} */ t) =>
    name === "version" ? t.span.weight_version : t.span.origin;
  const values = [...new Set(all.map(of))].filter((v) => v !== null);
  const shade = new Map(
    values.map((v, i) => [
      v,
      translucent(colour(name === "origin" ? `origin-${v}` : `run-${i % 8}`), 0.3),
    ]),
  );
  fill(
    legend,
    values.map((v) => [el("i.dot", { style: { background: shade.get(v) } }), el("span", null, v)]),
  );
  const paint = (/** @type {Token} */ token) => shade.get(of(token)) ?? "";
  paint.mean = (/** @type {Token[]} */ members) => paint(members[0]);
  return paint;
}

/** @param {string} shown As computed: rgb(…). @param {number} alpha */
function translucent(shown, alpha) {
  const parts = shown.match(/[\d.]+/g) ?? ["128", "128", "128"];
  return `rgba(${parts.slice(0, 3).join(",")},${alpha.toFixed(3)})`;
}
