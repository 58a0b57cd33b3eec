/** Two runs beside each other: their curves, what their configurations differ in, how they ended. */

import { drawLines, runColour } from "./charts.js";
import { el, empty, fill, select } from "./dom.js";
import { number, signed } from "./format.js";
import { note } from "./router.js";

const SHOWN = [
  "reward/mean",
  "val/reward",
  "val/accuracy",
  "train/loss",
  "val/loss",
  "rollout/kl",
  "time/step_s",
];
const NUM_SHOWN = 3;

/**
 * @param {HTMLElement} root
 * @param {Record<string, string>} params
 * @param {import("./main.js").App} app
 * @returns {import("./main.js").Shown}
 */
export function compare(root, params, app) {
  if (app.runs.length < 2) {
    fill(root, empty("There is one run", "Name two to compare them: treadle view RUN_DIR RUN_DIR"));
    return {};
  }
  let [a, b] = [Number(params.a ?? 0), Number(params.b ?? 1)];
  let everything = false;
  const tools = el("div.tools");
  const grid = el("div.charts");
  const tables = el("div.two");
  fill(root, el("div.page", null, tools, grid, tables));

  function draw() {
    const options = app.runs.map(
      (info, i) => /** @type {[string, string]} */ ([String(i), info.name]),
    );
    const choice = (
      /** @type {number} */ run,
      /** @type {(v: string) => void} */ change,
      /** @type {string} */ label,
    ) =>
      el(
        "label.legend-item",
        null,
        el("i", { style: { background: runColour(run) } }),
        select(options, String(run), change, { "aria-label": label }),
      );
    fill(
      tools,
      choice(
        a,
        (v) => {
          a = Number(v);
          changed();
        },
        "First run",
      ),
      el("span.muted", null, "and"),
      choice(
        b,
        (v) => {
          b = Number(v);
          changed();
        },
        "Second run",
      ),
    );
    fill(tables, configurations(), values());
    charts();
  }

  function changed() {
    note({ a, b });
    draw();
  }

  function configurations() {
    const [first, second] = [flat(app.runs[a].config), flat(app.runs[b].config)];
    const keys = [...new Set([...first.keys(), ...second.keys()])]
      .sort()
      .filter((key) => first.get(key) !== second.get(key));
    return el(
      "section.card",
      null,
      el("h2", null, "Configuration ", el("span.muted", null, `${keys.length} keys differ`)),
      keys.length > 0 &&
        el(
          "table.pairs",
          null,
          head(),
          keys.map((key) =>
            el(
              "tr",
              null,
              el("td", null, el("code", null, key)),
              el("td", null, first.get(key) ?? "–"),
              el("td", null, second.get(key) ?? "–"),
            ),
          ),
        ),
    );
  }

  function values() {
    const [first, second] = [app.feeds[a], app.feeds[b]];
    const names = [...new Set([...first.names(), ...second.names()])].sort();
    const rows = names
      .filter((name) => everything || !/^(time|drift|servers)\//.test(name))
      .map((name) => {
        const [x, y] = [first.last(name), second.last(name)];
        const difference = x && y ? y.value - x.value : null;
        return el(
          "tr",
          null,
          el("td", null, el("code", null, name)),
          el("td.n", { title: x && `step ${x.step}` }, number(x?.value)),
          el("td.n", { title: y && `step ${y.step}` }, number(y?.value)),
          el("td.n.muted", null, signed(difference)),
        );
      });
    return el(
      "section.card",
      null,
      el("h2", null, "Last values"),
      el(
        "label.muted",
        null,
        el("input", {
          type: "checkbox",
          checked: everything,
          onchange: (event) => {
            everything = event.target.checked;
            draw();
          },
        }),
        " also times, drift and servers",
      ),
      el("table.pairs", null, head("difference"), rows),
    );
  }

  /** @param {string} [last] */
  const head = (last) =>
    el(
      last ? "tr.numbers" : "tr",
      null,
      el("th"),
      el("th", null, app.runs[a].name),
      el("th", null, app.runs[b].name),
      last && el("th", null, last),
    );

  function charts() {
    const known = new Set([...app.feeds[a].names(), ...app.feeds[b].names()]);
    const names = SHOWN.filter((name) => known.has(name)).slice(0, NUM_SHOWN);
    const nodes = names.map(() => el("div.plot"));
    fill(
      grid,
      names.map((name, i) =>
        el("figure.chart", null, el("figcaption", null, el("b", null, name)), nodes[i]),
      ),
    );
    names.forEach((name, i) => {
      const lines = [...new Set([a, b])].map((run) => ({
        run,
        name: app.runs[run].name,
        ...app.feeds[run].series(name),
      }));
      drawLines(
        nodes[i],
        lines.filter((line) => line.y.length),
        { smoothing: 0.6, axis: "step" },
      );
    });
  }

  draw();
  return { news: draw };
}

/**
 * The leaves of a configuration by their dotted key, as JSON.
 * @param {any} value
 * @param {string} prefix
 * @param {Map<string, string>} found
 */
export function flat(value, prefix = "", found = new Map()) {
  if (value && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, item] of Object.entries(value))
      flat(item, prefix ? `${prefix}.${key}` : key, found);
  } else found.set(prefix, typeof value === "string" ? value : JSON.stringify(value));
  return found;
}
