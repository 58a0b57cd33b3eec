/** Beside a trajectory: its group, and what the same prompt gave at other steps. */

import { differences } from "./diff.js";
import { reward } from "./columns.js";
import { el, fill } from "./dom.js";
import { number, signed } from "./format.js";
import { link } from "./router.js";

/**
 * @param {any} found
 * @param {{run: number, params: Record<string, string>}} context
 */
export function neighbours(found, { run, params }) {
  const address = (/** @type {any} */ changes) =>
    link("trajectory", {
      run: run || null,
      step: found.step,
      phase: found.phase,
      task: found.task_id,
      index: found.rollout_index,
      filter: params.filter,
      sort: params.sort,
      tab: params.tab,
      ...changes,
    });
  return el("aside.neighbours", null, group(found, address), steps(found, address));
}

/** @param {any} found @param {(changes: any) => string} address */
function group(found, address) {
  const rewards = found.group
    .map((/** @type {any} */ r) => r.reward)
    .filter((/** @type {any} */ v) => v !== null);
  const mean =
    rewards.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0) / rewards.length;
  return el(
    "section",
    null,
    el(
      "h2",
      null,
      "Its group ",
      el("span.muted", null, `${found.group.length}, mean reward ${number(mean)}`),
    ),
    el(
      "ol.group",
      null,
      found.group.map((/** @type {any} */ row) =>
        el(
          "li",
          { "aria-current": row.rollout_index === found.rollout_index ? "true" : null },
          el(
            "a",
            { href: address({ index: row.rollout_index }) },
            el(
              "span.head",
              null,
              el("b", null, `#${row.rollout_index}`),
              reward(row.reward),
              el("span.muted", null, signed(row.advantage)),
              el(`span.tag${row.error ? ".bad" : ""}`, null, row.stop),
            ),
            el("span.excerpt", null, row.error ?? (row.response || "(nothing said)")),
          ),
        ),
      ),
    ),
  );
}

/** @param {any} found @param {(changes: any) => string} address */
function steps(found, address) {
  /** @type {Map<number, any[]>} */
  const byStep = new Map();
  for (const row of found.other_steps) byStep.set(row.step, [...(byStep.get(row.step) ?? []), row]);
  const result = el("div.diff");
  /** @param {any[]} rows */
  const compare = (rows) => {
    const other = rows.find((row) => row.rollout_index === found.rollout_index) ?? rows[0];
    const [before, after] = other.step < found.step ? [other, found] : [found, other];
    fill(
      result,
      el("h3", null, `Step ${before.step} → ${after.step}`),
      el(
        "p.muted",
        null,
        "reward ",
        number(before.reward),
        " → ",
        number(after.reward),
        " · ",
        el(
          "a",
          { href: address({ step: other.step, index: other.rollout_index }) },
          `open step ${other.step} #${other.rollout_index}`,
        ),
      ),
      el(
        "p.difference",
        null,
        differences(before.response, after.response).map(({ kind, text }) =>
          kind === "same" ? text : el(kind === "added" ? "ins" : "del", null, text),
        ),
      ),
    );
  };
  return el(
    "section",
    null,
    el("h2", null, "The same prompt at other steps"),
    byStep.size === 0 && el("p.muted", null, "It was sampled at this step only."),
    byStep.size > 0 && el("p.muted", null, "Choose a step to see what changed in the response."),
    el(
      "ul.steps",
      null,
      [...byStep]
        .sort(([a], [b]) => a - b)
        .map(([step, rows]) => {
          const scored = rows.map((row) => row.reward).filter((v) => v !== null);
          const mean = scored.length ? scored.reduce((a, b) => a + b, 0) / scored.length : null;
          return el(
            "li",
            null,
            el(
              "button",
              { type: "button", onclick: () => compare(rows) },
              el("b", null, `step ${step}`),
              " ",
              reward(mean),
              el("span.muted", null, ` of ${rows.length}`),
            ),
          );
        }),
    ),
    result,
  );
}
