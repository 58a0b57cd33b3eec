/** What a timeline says in numbers: the time by cause, and the long tail. */

import { el } from "./dom.js";
import { percent, seconds } from "./format.js";
import { link } from "./router.js";

/** What each cause of CAUSES in timeline.py is. */
const MEANING = {
  paused: "waiting for new weights",
  prefill: "reading prompts",
  decode: "sampling",
  queue: "waiting for a server",
  tool: "tools",
  interaction: "the simulated user",
  reward: "the reward",
  generate: "requests, between driver and server",
  other: "everything else",
};

/** @param {any} found */
export function causes(found) {
  const parts = found.causes
    .map((/** @type {string} */ c) => [c, found.totals[c], `cause-${c}`, MEANING[c]])
    .filter((/** @type {any} */ p) => p[1] > 0);
  return el(
    "section.card",
    null,
    el("h2", null, "Where the trajectories' time went"),
    shares(parts),
  );
}

/** @param {[string, number, string, string][]} parts Name, seconds, colour, meaning. */
export function shares(parts) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  return [
    el(
      "div.share",
      null,
      parts.map(([name, value, shown]) =>
        el("i", {
          title: `${name}: ${seconds(value)}`,
          style: { width: `${(value / total) * 100}%`, background: `var(--${shown})` },
        }),
      ),
    ),
    el(
      "table.pairs",
      null,
      parts.map(([name, value, shown, meaning]) =>
        el(
          "tr",
          { title: meaning },
          el(
            "td",
            null,
            el("i.dot", { style: { background: `var(--${shown})` } }),
            meaning || name,
          ),
          el("td.n", null, seconds(value)),
          el("td.n", null, percent(value / total)),
        ),
      ),
    ),
  ];
}

/** @param {any} found @param {number} run */
export function tail(found, run) {
  const ends = found.ends_s;
  const quantile = (/** @type {number} */ q) =>
    ends[Math.min(ends.length - 1, Math.ceil(ends.length * q) - 1)];
  const [half, most, last] = [quantile(0.5), quantile(0.9), ends[ends.length - 1]];
  const slowest = found.bars.reduce((/** @type {any} */ a, /** @type {any} */ b) =>
    b.start_s + b.duration_s > a.start_s + a.duration_s ? b : a,
  );
  return el(
    "section.card",
    null,
    el("h2", null, "The long tail"),
    el(
      "table.pairs",
      null,
      [
        ["half had ended after", half],
        ["90 % had ended after", most],
        ["the last ended after", last],
      ].map(([name, value]) =>
        el("tr", null, el("td", null, name), el("td.n", null, seconds(Number(value)))),
      ),
    ),
    el(
      "p",
      null,
      `For ${percent((last - most) / (last || 1))} of the time, at most a tenth of the trajectories ran. The last was `,
      el(
        "a",
        {
          href: link("trajectory", {
            run: run || null,
            step: found.step,
            phase: found.phase,
            task: slowest.task_id,
            index: slowest.rollout_index,
          }),
        },
        `${slowest.task_id} #${slowest.rollout_index}`,
      ),
      ".",
    ),
  );
}
