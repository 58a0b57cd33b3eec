/** The columns of the table of trajectories. */

import { el } from "./dom.js";
import { count, number, seconds, signed } from "./format.js";

/** @typedef {Record<string, any>} Row */

/**
 * Label, column to sort by (or null), class, and what a cell shows.
 * @type {[string, string | null, string, (row: Row) => any][]}
 */
export const COLUMNS = [
  ["Step", "step", "n", (row) => row.step],
  ["Phase", "phase", "", (row) => row.phase],
  ["Task", "task_id", "id", (row) => `${row.task_id} #${row.rollout_index}`],
  ["Reward", "reward", "n", (row) => reward(row.reward)],
  ["Advantage", "advantage", "n", (row) => signed(row.advantage)],
  [
    "Stop",
    "stop",
    "",
    (row) => el(`span.tag${row.error ? ".bad" : ""}`, { title: row.error }, row.stop),
  ],
  ["Turns", "num_turns", "n", (row) => count(row.num_turns)],
  ["Tokens", "num_tokens", "n", (row) => count(row.num_tokens)],
  ["Time", "duration_s", "n", (row) => seconds(row.duration_s)],
  ["Drift", "drift", "n", (row) => (row.drift ? el("span.tag.warn", null, row.drift) : "")],
  ["Tools", null, "", (row) => row.tools.map((tool) => el("span.tag", null, tool))],
  [
    "Prompt → response",
    null,
    "text",
    (row) => [
      el("span", null, row.prompt),
      el("br"),
      el("span.muted", null, row.error ?? row.response),
    ],
  ],
];

/** @param {number | null} value */
export function reward(value) {
  if (value === null) return "–";
  const kind = value > 0 ? "good" : value < 0 ? "bad" : "zero";
  return el(`span.reward.${kind}`, null, number(value));
}
