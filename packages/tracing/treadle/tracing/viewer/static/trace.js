/** The spans of one trajectory as a tree, each with its place in time and its attributes. */

import { el, empty } from "./dom.js";
import { seconds } from "./format.js";

/** Spans that have a colour, by their names. */
const CAUSES = [
  ...["paused", "prefill", "decode", "queue", "tool", "interaction", "reward", "generate"],
];

/** @param {any} found */
export function trace(found) {
  if (!found.trace.length) return empty("No trace", "Nothing was timed while this trajectory ran.");
  const begin = Math.min(...found.trace.map((/** @type {any} */ s) => s.start_unix_ns));
  const end = Math.max(
    ...found.trace.map((/** @type {any} */ s) => s.start_unix_ns + s.duration_ns),
  );
  const length = Math.max(1, end - begin);
  const known = new Set(found.trace.map((/** @type {any} */ s) => s.span_id));
  const below = (/** @type {string | null} */ parent) =>
    found.trace
      .filter((/** @type {any} */ s) => (known.has(s.parent_id) ? s.parent_id : null) === parent)
      .sort((/** @type {any} */ a, /** @type {any} */ b) => a.start_unix_ns - b.start_unix_ns);
  /** @param {any} span @param {number} depth @returns {Node[]} */
  const rows = (span, depth) => [
    row(span, depth, begin, length),
    ...below(span.span_id).flatMap((/** @type {any} */ s) => rows(s, depth + 1)),
  ];
  return el(
    "div.trace",
    null,
    below(null).flatMap((/** @type {any} */ span) => rows(span, 0)),
  );
}

/** @param {any} span @param {number} depth @param {number} begin @param {number} length */
function row(span, depth, begin, length) {
  const left = ((span.start_unix_ns - begin) / length) * 100;
  const width = Math.max(0.3, (span.duration_ns / length) * 100);
  return el(
    "details.trace-row",
    null,
    el(
      "summary",
      null,
      el(
        "span.name",
        { style: { paddingLeft: `${depth * 14}px` } },
        span.name,
        span.attributes.tool && el("span.muted", null, ` ${span.attributes.tool}`),
      ),
      el(
        "span.track",
        null,
        el(`i.cause-${causeOf(span.name)}${span.error ? ".failed" : ""}`, {
          style: { left: `${left}%`, width: `${Math.min(width, 100 - left)}%` },
        }),
      ),
      el("span.n", null, seconds(span.duration_ns / 1e9)),
    ),
    span.error && el("p.error", null, span.error),
    el("pre", null, JSON.stringify(span.attributes, null, 2)),
  );
}

/** @param {string} name */
export function causeOf(name) {
  if (name === "tools") return "tool";
  if (name === "route") return "queue";
  return CAUSES.includes(name) ? name : "other";
}
