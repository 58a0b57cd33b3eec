/** The timeline of a step: when each trajectory ran and on what its time went. */

import { get } from "./api.js";
import { el, empty, fill, select } from "./dom.js";
import { plural, seconds } from "./format.js";
import { go, note } from "./router.js";
import { onTheme } from "./theme.js";
import { causes, shares, tail } from "./timeline_cards.js";
import { drawBars } from "./timeline_canvas.js";

/** @type {Record<string, (a: any, b: any) => number>} */
const ORDERS = {
  start: (a, b) => a.start_s - b.start_s,
  end: (a, b) => a.start_s + a.duration_s - b.start_s - b.duration_s,
  duration: (a, b) => b.duration_s - a.duration_s,
};

/**
 * @param {HTMLElement} root
 * @param {Record<string, string>} params
 * @param {import("./main.js").App} app
 * @returns {import("./main.js").Shown}
 */
export function timeline(root, params, app) {
  const run = Number(params.run ?? 0);
  let order = params.order ?? "start";
  /** @type {any[]} */
  let steps = [];
  let at = 0;
  /** @type {any} */
  let found = null;
  const tools = el("div.tools");
  const body = el("div");
  fill(root, el("div.page", null, tools, body));

  async function learn() {
    const facets = await get(`runs/${run}/facets`);
    steps = facets.steps;
    const wanted = steps.findIndex(
      (s) => String(s.step) === params.step && s.phase === params.phase,
    );
    const lastTrained = steps.map((s) => s.phase).lastIndexOf("train");
    at = wanted >= 0 ? wanted : Math.max(0, lastTrained);
  }

  async function load() {
    if (!steps.length)
      return fill(body, empty("No steps yet", "A step is here when its trajectories are written."));
    const { step, phase } = steps[at];
    note({ step, phase });
    drawTools();
    body.classList.add("loading");
    found = await get(`runs/${run}/timeline`, { step, phase });
    body.classList.remove("loading");
    if (root.isConnected) draw();
  }

  /** @param {Promise<any>} work */
  const told = (work) =>
    work.catch((error) => fill(body, empty("The timeline cannot be shown", error.message)));

  /** @param {number} to */
  function turn(to) {
    if (to < 0 || to >= steps.length) return;
    at = to;
    told(load());
  }

  function drawTools() {
    fill(
      tools,
      el(
        "button",
        {
          type: "button",
          title: "Previous step (k)",
          disabled: at === 0,
          onclick: () => turn(at - 1),
        },
        "‹",
      ),
      select(
        steps.map((s, i) => [String(i), `step ${s.step}, ${s.phase}: ${s.trajectories}`]),
        String(at),
        (v) => turn(Number(v)),
        { "aria-label": "Step" },
      ),
      el(
        "button",
        {
          type: "button",
          title: "Next step (j)",
          disabled: at === steps.length - 1,
          onclick: () => turn(at + 1),
        },
        "›",
      ),
      el(
        "label",
        null,
        "Order by ",
        select(
          [
            ["start", "start"],
            ["end", "end"],
            ["duration", "time, longest first"],
          ],
          order,
          (v) => {
            order = v;
            note({ order: v === "start" ? null : v });
            draw();
          },
          { "aria-label": "Order" },
        ),
      ),
    );
  }

  function draw() {
    if (!found.bars.length) {
      fill(
        body,
        empty("Nothing was timed", `The trajectories of step ${found.step} have no trace.`),
      );
      return;
    }
    const bars = [...found.bars].sort(ORDERS[order] ?? ORDERS.start);
    fill(
      body,
      el("div.cards", null, causes(found), tail(found, run), phases()),
      notes(),
      drawBars(bars, (bar) =>
        go("trajectory", {
          run: run || null,
          step: found.step,
          phase: found.phase,
          task: bar.task_id,
          index: bar.rollout_index,
        }),
      ),
    );
  }

  function notes() {
    return [
      found.without_trace > 0 &&
        el("p.muted", null, `${plural(found.without_trace, "row")} without a trace is not shown.`),
      found.note && el("p.muted", null, found.note),
      !found.has_server_spans &&
        !found.note &&
        el(
          "p.muted",
          null,
          "The run's traces have no server spans. With tracing.backends=[jsonl], queue, prefill and decode of each request are shown.",
        ),
    ];
  }

  /** Seconds of the step's phases, as its metrics have them. */
  function phases() {
    const line = app.feeds[run]?.lines.find((l) => l.step === found.step) ?? {};
    const parts = Object.entries(line)
      .filter(([name, value]) => /^time\/.*_s$/.test(name) && name !== "time/step_s" && value)
      .map(([name, value]) => [name.slice(5, -2), Number(value)])
      .sort((a, b) => Number(b[1]) - Number(a[1]));
    const spans = found.step_spans.map((/** @type {any} */ s) => [
      s.label ? `${s.name}, ${s.label}` : s.name,
      s.duration_s,
    ]);
    return el(
      "section.card",
      null,
      el("h2", null, "The step as a whole"),
      parts.length + spans.length === 0 &&
        el("p.muted", null, "metrics.jsonl has no times of this step."),
      parts.length > 0 &&
        shares(parts.map(([name, value], i) => [String(name), Number(value), `run-${i % 8}`, ""])),
      spans.length > 0 &&
        el(
          "table.pairs",
          null,
          spans.map(([name, s]) =>
            el("tr", null, el("td", null, name), el("td.n", null, seconds(s))),
          ),
        ),
    );
  }

  told(learn().then(load));
  return {
    leave: onTheme(() => found && draw()),
    keys: [
      { key: "j", does: "next step", run: () => turn(at + 1) },
      { key: "k", does: "previous step", run: () => turn(at - 1) },
      { key: "ArrowRight", does: "next step", run: () => turn(at + 1) },
      { key: "ArrowLeft", does: "previous step", run: () => turn(at - 1) },
      {
        key: "/",
        does: "filter the trajectories of the step",
        run: () =>
          go("trajectories", {
            run: run || null,
            filter: `step=${found?.step} phase=${found?.phase}`,
          }),
      },
    ],
  };
}
