/** The curves: any metrics, all runs overlaid, smoothed as the reader likes, alive while training. */

import { drawLines, runColour } from "./charts.js";
import { el, empty, fill, select } from "./dom.js";
import { number } from "./format.js";
import { note } from "./router.js";

/** Shown first, as far as a run has them. */
const FIRST = [
  ...["reward/mean", "val/reward", "train/loss", "val/loss", "groups/with_signal", "actor/entropy"],
  ...["tool/call_rate", "rollout/response_tokens", "actor/grad_norm", "rollout/kl", "time/step_s"],
];
const NUM_FIRST = 6;

/**
 * @param {HTMLElement} root
 * @param {Record<string, string>} params
 * @param {import("./main.js").App} app
 * @returns {import("./main.js").Shown}
 */
export function curves(root, params, app) {
  let smoothing = Number(params.smooth ?? 0.6);
  /** @type {"step" | "hours"} */
  let axis = params.x === "hours" ? "hours" : "step";
  /** @type {string[] | null} Null: those of FIRST. */
  let chosen = params.m ? params.m.split(",") : null;
  const hidden = new Set();
  /** @type {Map<string, any>} The drawn charts. */
  const charts = new Map();

  const search = el("input", {
    type: "search",
    placeholder: "Find a metric",
    "aria-label": "Find a metric",
    oninput: list,
  });
  const names = el("div.metric-names");
  const legend = el("div.legend");
  const grid = el("div.charts");
  const notes = el("div");
  const output = el("output", null, smoothing.toFixed(2));
  const slider = el("input", {
    type: "range",
    min: 0,
    max: 0.99,
    step: 0.01,
    value: smoothing,
    "aria-label": "Smoothing",
    oninput: (event) => {
      smoothing = Number(event.target.value);
      fill(output, smoothing.toFixed(2));
      note({ smooth: smoothing });
      draw();
    },
  });
  const axes = select(
    [
      ["step", "by step"],
      ["hours", "by hours"],
    ],
    axis,
    (value) => {
      axis = value === "hours" ? "hours" : "step";
      note({ x: value === "step" ? null : value });
      draw();
    },
    { "aria-label": "Horizontal axis" },
  );
  fill(
    root,
    el(
      "div.with-side",
      null,
      el("aside.side", null, search, names),
      el(
        "section",
        null,
        el(
          "div.tools",
          null,
          legend,
          el("span.grow"),
          el("label.slider", null, "Smoothing", slider, output),
          axes,
        ),
        grid,
        notes,
      ),
    ),
  );

  const all = () => [...new Set(app.feeds.flatMap((feed) => feed.names()))].sort();
  const selection = () => {
    const known = new Set(all());
    return chosen
      ? chosen.filter((name) => known.has(name))
      : FIRST.filter((name) => known.has(name)).slice(0, NUM_FIRST);
  };

  /** @param {string} name @param {boolean} on */
  function choose(name, on) {
    const now = selection().filter((other) => other !== name);
    chosen = on ? [...now, name] : now;
    note({ m: chosen.join(",") });
    draw();
  }

  function list() {
    const wanted = search.value.toLowerCase();
    const on = new Set(selection());
    /** @type {Map<string, string[]>} */
    const groups = new Map();
    for (const name of all().filter((n) => n.toLowerCase().includes(wanted))) {
      const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : "other";
      groups.set(group, [...(groups.get(group) ?? []), name]);
    }
    const open = new Set(
      [...names.querySelectorAll("details[open]")].map((/** @type {any} */ d) => d.dataset.group),
    );
    fill(
      names,
      [...groups].map(([group, members]) =>
        el(
          "details",
          {
            "data-group": group,
            open: wanted || open.has(group) || members.some((n) => on.has(n)) ? "" : null,
          },
          el("summary", null, group, el("span.muted", null, ` ${members.length}`)),
          members.map((name) =>
            el(
              "label",
              { title: name },
              el("input", {
                type: "checkbox",
                checked: on.has(name),
                onchange: (event) => choose(name, event.target.checked),
              }),
              name.slice(name.indexOf("/") + 1),
            ),
          ),
        ),
      ),
    );
  }

  function drawLegend() {
    fill(
      legend,
      app.runs.map((info, run) =>
        el(
          "button.legend-item",
          {
            type: "button",
            title: `${info.directory}: show or hide`,
            "aria-pressed": String(!hidden.has(run)),
            onclick: () => {
              hidden.has(run) ? hidden.delete(run) : hidden.add(run);
              drawLegend();
              draw();
            },
          },
          el("i", { style: { background: runColour(run) } }),
          info.name,
          el(`span.state.${info.state}`, null, info.state),
        ),
      ),
    );
  }

  function drawNotes() {
    const found = app.runs
      .flatMap((info) => info.notes.map((n) => ({ ...n, run: info.name })))
      .sort((x, y) => x.step - y.step);
    fill(
      notes,
      found.length > 0 &&
        el(
          "section.notes",
          null,
          el("h2", null, "Notes of the run"),
          el(
            "ul",
            null,
            found
              .slice(-50)
              .reverse()
              .map((n) =>
                el(
                  "li",
                  null,
                  el(
                    "span.muted",
                    null,
                    `step ${n.step}${app.runs.length > 1 ? `, ${n.run}` : ""}`,
                  ),
                  n.note,
                ),
              ),
          ),
        ),
    );
  }

  /** @param {string} name */
  function chart(name) {
    const node = el("div.plot");
    const last = el("span.last");
    const card = el(
      "figure.chart",
      { "data-metric": name },
      el(
        "figcaption",
        null,
        el("b", null, name),
        last,
        el(
          "button.quiet",
          { type: "button", title: "Remove this chart", onclick: () => choose(name, false) },
          "×",
        ),
      ),
      node,
    );
    return Object.assign(card, { node, last });
  }

  function draw() {
    list();
    const wanted = selection();
    if (!wanted.length) {
      charts.clear();
      fill(
        grid,
        app.feeds.some((feed) => feed.lines.length)
          ? empty("No metric is chosen", "Choose metrics on the left.")
          : empty("No steps yet", "The curves appear with the first line of metrics.jsonl."),
      );
      return;
    }
    for (const name of charts.keys()) if (!wanted.includes(name)) charts.delete(name);
    for (const name of wanted) if (!charts.has(name)) charts.set(name, chart(name));
    const cards = wanted.map((name) => charts.get(name));
    if (cards.some((card, i) => grid.children[i] !== card) || grid.children.length !== cards.length)
      fill(grid, cards);
    for (const name of wanted) {
      const card = charts.get(name);
      const lines = app.feeds
        .map((feed) => ({
          run: feed.run,
          name: app.runs[feed.run].name,
          ...feed.series(name, axis),
        }))
        .filter((line) => line.y.length && !hidden.has(line.run));
      const ends = lines.map((line) => number(app.feeds[line.run].last(name)?.value));
      fill(card.last, ends.join(" · "));
      drawLines(card.node, lines, { smoothing, axis });
    }
  }

  function news() {
    drawLegend();
    drawNotes();
    draw();
  }
  news();
  return {
    news,
    keys: [{ key: "/", does: "find a metric", run: () => search.focus() }],
  };
}
