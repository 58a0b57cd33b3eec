/**
 * Starts the page: polls the runs, chooses the view that the address names, and gives it its keys.
 *
 * A view is a function (root, params, app) that draws into root and returns what it wants: its
 * keys, what to do when the runs or metrics have news, and what to end when it is left.
 *
 * @typedef {{
 *   keys?: import("./keys.js").Key[],
 *   news?: () => void,
 *   leave?: () => void,
 * }} Shown
 * @typedef {{
 *   name: string, directory: string, state: string, step: number | null, error: string | null,
 *   ends_at: string | null, notes: {step: number, note: string}[], config: Record<string, any>,
 *   problems: string[], summary?: string[][],
 * }} RunInfo
 * @typedef {{runs: RunInfo[], feeds: MetricFeed[]}} App
 */

import { get } from "./api.js";
import { compare } from "./compare.js";
import { curves } from "./curves.js";
import { el, empty, fill, select } from "./dom.js";
import { MetricFeed } from "./feed.js";
import { setViewKeys, showKeys, startKeys } from "./keys.js";
import { oneFile } from "./one_file.js";
import { overview } from "./overview.js";
import { go, link, place } from "./router.js";
import { startTheme, toggleTheme } from "./theme.js";
import { timeline } from "./timeline.js";
import { trajectories } from "./trajectories.js";
import { trajectory } from "./trajectory.js";

const LIVE_MS = 2000;
const IDLE_MS = 10000;

/** @type {[string, string, (root: HTMLElement, params: any, app: App) => Shown][]} */
const VIEWS = [
  ["overview", "Run", overview],
  ["curves", "Curves", curves],
  ["trajectories", "Trajectories", trajectories],
  ["timeline", oneFile ? "" : "Timeline", timeline],
  ["compare", oneFile ? "" : "Compare", compare],
  ["trajectory", "", trajectory],
];
/** Views of one run, which the header chooses. */
const OF_ONE_RUN = ["overview", "trajectories", "timeline", "trajectory"];

/** @type {App} */
const app = { runs: [], feeds: [] };
/** @type {Shown} */
let shown = {};
/** @type {Set<string>} Problems that the reader has closed. */
const closed = new Set();

function show() {
  const { view, params } = place();
  shown.leave?.();
  const found = VIEWS.find(([name]) => name === view);
  const root = el("div.view", { "data-view": view });
  fill(/** @type {HTMLElement} */ (document.getElementById("view")), root);
  if (found) shown = found[2](root, params, app);
  else fill(root, empty("No such view", `The address names ${view}.`));
  setViewKeys(shown.keys ?? []);
  header();
}

function header() {
  const { view, params } = place();
  const tab = view === "trajectory" ? "trajectories" : view;
  const run = Number(params.run ?? 0);
  fill(
    document.getElementById("nav"),
    VIEWS.filter(([, label]) => label).map(([name, label]) =>
      el(
        "a",
        {
          href: link(name, OF_ONE_RUN.includes(name) ? { run: run || null } : {}),
          "aria-current": name === tab ? "page" : null,
        },
        label,
      ),
    ),
  );
  const choice = document.getElementById("run-choice");
  if (OF_ONE_RUN.includes(view) && app.runs.length > 1) {
    const options = app.runs.map(
      (info, i) => /** @type {[string, string]} */ ([String(i), info.name]),
    );
    fill(
      choice,
      select(options, String(run), (value) => go(tab, { run: value }), { "aria-label": "Run" }),
    );
  } else {
    fill(choice, app.runs.length === 1 ? state(app.runs[0]) : null);
  }
  document.title = `${app.runs.map((info) => info.name).join(", ")} – Treadle`;
  problems();
}

/** @param {RunInfo} info */
export function state(info) {
  const step = info.step === null ? "" : `, step ${info.step}`;
  const title =
    info.error ?? (info.ends_at ? `expected to end at ${info.ends_at}` : info.directory);
  return el(`span.state.${info.state}`, { title }, `${info.name}: ${info.state}${step}`);
}

function problems() {
  const several = app.runs.length > 1;
  const texts = app.runs.flatMap((info, run) =>
    [
      ...info.problems,
      ...(app.feeds[run]?.damaged
        ? [`metrics.jsonl: ${app.feeds[run].damaged} damaged lines are left out`]
        : []),
      ...(info.error ? [`the run failed: ${info.error}`] : []),
    ].map((text) => (several ? `${info.name}: ${text}` : text)),
  );
  const open = texts.filter((text) => !closed.has(text));
  fill(
    document.getElementById("problems"),
    open.length > 0 &&
      el(
        "div.problems",
        { role: "status" },
        el(
          "ul",
          null,
          open.slice(0, 8).map((text) => el("li", null, text)),
          open.length > 8 && el("li", null, `and ${open.length - 8} more`),
        ),
        el(
          "button.quiet",
          {
            type: "button",
            title: "Close",
            onclick: () => {
              open.forEach((t) => closed.add(t));
              problems();
            },
          },
          "×",
        ),
      ),
  );
}

async function poll() {
  try {
    const before = JSON.stringify(app.runs);
    app.runs = (await get("runs")).runs;
    while (app.feeds.length < app.runs.length) app.feeds.push(new MetricFeed(app.feeds.length));
    const news = await Promise.all(app.feeds.map((feed) => feed.read()));
    if (before !== JSON.stringify(app.runs) || news.some(Boolean)) {
      header();
      shown.news?.();
    }
    document.body.classList.remove("stale");
  } catch (error) {
    document.body.classList.add("stale");
    fill(
      document.getElementById("problems"),
      el("div.problems", { role: "status" }, String(/** @type {Error} */ (error).message)),
    );
  }
}

async function keepPolling() {
  for (;;) {
    const live = app.runs.some((info) => info.state === "running");
    await new Promise((resolve) => setTimeout(resolve, live ? LIVE_MS : IDLE_MS));
    if (!document.hidden) await poll();
  }
}

startTheme();
startKeys([
  { key: "1", does: "curves", run: () => go("curves") },
  { key: "2", does: "trajectories", run: () => go("trajectories", { run: place().params.run }) },
  { key: "3", does: "timeline of a step", run: () => go("timeline", { run: place().params.run }) },
  { key: "4", does: "compare two runs", run: () => go("compare") },
  { key: "5", does: "the run as a whole", run: () => go("overview", { run: place().params.run }) },
  { key: "d", does: "light or dark", run: toggleTheme },
  { key: "?", does: "this list", run: showKeys },
]);
await poll();
window.addEventListener("hashchange", show);
show();
document.addEventListener("visibilitychange", () => document.hidden || poll());
if (!oneFile) keepPolling();
