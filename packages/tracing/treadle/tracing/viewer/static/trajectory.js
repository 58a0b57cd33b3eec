/** One trajectory: what was said, token by token, what was timed, and its group beside it. */

import { get } from "./api.js";
import { conversation } from "./conversation.js";
import { reward } from "./columns.js";
import { el, empty, fill } from "./dom.js";
import { count, number, seconds, signed } from "./format.js";
import { neighbours } from "./neighbours.js";
import { go, link, note, place } from "./router.js";
import { onTheme } from "./theme.js";
import { tokens } from "./tokens.js";
import { trace } from "./trace.js";

/** @type {[string, string][]} */
const TABS = [
  ["messages", "Messages"],
  ["tokens", "Tokens"],
  ["trace", "Trace"],
  ["metrics", "Metrics"],
];

/**
 * @param {HTMLElement} root
 * @param {Record<string, string>} params
 * @param {import("./main.js").App} app
 * @returns {import("./main.js").Shown}
 */
export function trajectory(root, params, app) {
  const run = Number(params.run ?? 0);
  let tab = params.tab ?? "messages";
  /** @type {any} */
  let found = null;
  /** Set by the tab of tokens. @type {((by: number) => void) | null} */
  let moveToken = null;
  const body = el("div.tab-body");
  const tabs = el("div.tabs", { role: "tablist" });

  async function load() {
    fill(root, el("p.muted.page", null, "Loading …"));
    try {
      found = await get(`runs/${run}/trajectory`, {
        step: params.step,
        phase: params.phase,
        task_id: params.task,
        rollout_index: params.index,
      });
    } catch (error) {
      fill(
        root,
        empty(
          "This trajectory cannot be shown",
          /** @type {Error} */ (error).message,
          " ",
          el("a", { href: back() }, "Back to the table"),
        ),
      );
      return;
    }
    draw();
  }

  const back = () =>
    link("trajectories", {
      run: run || null,
      filter: params.filter,
      sort: params.sort,
      offset: Math.floor(Number(params.pos ?? 0) / 100) * 100 || null,
      selected: Number(params.pos ?? 0) % 100 || null,
    });

  function draw() {
    fill(
      root,
      el(
        "div.trajectory",
        null,
        el(
          "section",
          null,
          el(
            "div.tools.crumbs",
            null,
            el("a", { href: back() }, "Trajectories"),
            el("span.muted", null, "›"),
            el("span", null, `step ${found.step}`),
            el("span.muted", null, "›"),
            el("span", null, found.phase),
            el("span.muted", null, "›"),
            el("b", null, `${found.task_id} #${found.rollout_index}`),
            el("span.grow"),
            params.pos !== undefined && [
              el(
                "button",
                { type: "button", title: "Previous of the table (k)", onclick: () => step(-1) },
                "‹",
              ),
              el(
                "button",
                { type: "button", title: "Next of the table (j)", onclick: () => step(1) },
                "›",
              ),
            ],
          ),
          facts(found),
          problems(found),
          tabs,
          body,
        ),
        neighbours(found, { run, params }),
      ),
    );
    drawTab();
  }

  function drawTab() {
    fill(
      tabs,
      TABS.map(([name, label]) =>
        el(
          "button",
          {
            type: "button",
            role: "tab",
            "aria-selected": String(name === tab),
            onclick: () => choose(name),
          },
          label,
        ),
      ),
    );
    moveToken = null;
    if (tab === "tokens") {
      const pane = tokens(found);
      moveToken = pane.move;
      fill(body, pane.node);
    } else if (tab === "trace") fill(body, trace(found));
    else if (tab === "metrics") fill(body, metrics(found));
    else fill(body, conversation(found, run));
  }

  /** @param {string} name */
  function choose(name) {
    tab = name;
    note({ tab: name === "messages" ? null : name });
    drawTab();
  }

  /** Opens the next trajectory of the table that this one was opened from. @param {number} by */
  async function step(by) {
    const pos = Number(params.pos ?? NaN) + by;
    if (!(pos >= 0)) return;
    const next = await get(`runs/${run}/trajectories`, {
      filter: params.filter ?? "",
      sort: params.sort ?? "",
      limit: 1,
      offset: pos,
    });
    const row = next.rows[0];
    if (!row || !root.isConnected) return;
    go("trajectory", {
      ...place().params,
      step: row.step,
      phase: row.phase,
      task: row.task_id,
      index: row.rollout_index,
      pos,
    });
  }

  /** Opens the next trajectory of the group. @param {number} by */
  function inGroup(by) {
    if (!found) return;
    const at = found.group.findIndex(
      (/** @type {any} */ row) => row.rollout_index === found.rollout_index,
    );
    const row = found.group[at + by];
    if (row) go("trajectory", { ...place().params, index: row.rollout_index, pos: null });
  }

  load();
  return {
    leave: onTheme(() => found && drawTab()),
    keys: [
      { key: "j", does: "next trajectory of the table", run: () => step(1) },
      { key: "k", does: "previous trajectory of the table", run: () => step(-1) },
      { key: "ArrowRight", does: "next trajectory of the group", run: () => inGroup(1) },
      { key: "ArrowLeft", does: "previous trajectory of the group", run: () => inGroup(-1) },
      {
        key: "t",
        does: "messages or tokens",
        run: () => choose(tab === "tokens" ? "messages" : "tokens"),
      },
      { key: ".", does: "next token", run: () => moveToken?.(1) },
      { key: ",", does: "previous token", run: () => moveToken?.(-1) },
      {
        key: "u",
        does: "back to the table",
        run: () => {
          location.hash = back();
        },
      },
      {
        key: "/",
        does: "back to the table, to filter",
        run: () => {
          location.hash = back();
        },
      },
    ],
  };
}

/** @param {any} found */
function facts(found) {
  const right = found.ground_truth !== null;
  /** @type {[string, any][]} */
  const shown = [
    ["Reward", reward(found.reward)],
    ["Advantage", signed(found.advantage)],
    ["Stop", el(`span.tag${found.error ? ".bad" : ""}`, null, found.stop)],
    ["Answer", found.answer ?? "–"],
    ...(right ? [/** @type {[string, any]} */ (["Ground truth", found.ground_truth])] : []),
    ["Turns", count(found.num_turns)],
    ["Tokens", `${count(found.num_tokens)} (${count(found.num_sampled_tokens)} sampled)`],
    ["Time", seconds(found.duration_s)],
    ["Loop", found.loop],
    ...(found.tool_rewards.some(Boolean)
      ? [/** @type {[string, any]} */ (["Tool rewards", found.tool_rewards.map(number).join(", ")])]
      : []),
    ...(found.sample_rewards
      ? [
          /** @type {[string, any]} */ ([
            "Rewards of players",
            found.sample_rewards
              .map((/** @type {any} */ one) => `${one.player}: ${number(one.value)}`)
              .join(", "),
          ]),
        ]
      : []),
    ...(found.turn_scores.length
      ? [/** @type {[string, any]} */ (["Turn scores", found.turn_scores.map(number).join(", ")])]
      : []),
  ];
  return el(
    "dl.facts",
    null,
    shown.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))),
  );
}

/** @param {any} found */
function problems(found) {
  return [
    found.cut &&
      el(
        "div.card.warn",
        null,
        "Its tokens, its trace and the end of long texts are left out of this file; treadle view shows them.",
      ),
    found.error !== null &&
      el(
        "div.card.bad",
        null,
        el("b", null, found.error),
        found.traceback &&
          el(
            "details",
            { open: "" },
            el("summary", null, "Traceback"),
            el("pre", null, found.traceback),
          ),
      ),
    ...found.findings.map((/** @type {any} */ finding) =>
      el("div.card.warn", null, el("b", null, finding.kind), " ", finding.text),
    ),
  ];
}

/** @param {any} found */
function metrics(found) {
  const entries = Object.entries(found.metrics).sort();
  if (!entries.length) return empty("No metrics", "The loop and its tools reported none.");
  return el(
    "table.pairs",
    null,
    entries.map(([name, value]) =>
      el("tr", null, el("td", null, name), el("td.n", null, number(value))),
    ),
  );
}
