/** Line charts of metrics: the pointer reads values, a drag zooms, a double click shows all again. */

import { el, fill } from "./dom.js";
import { smooth } from "./feed.js";
import { number } from "./format.js";

const RUN_COLOURS = 8;
/** Fewer values are drawn as they are: the mean of a few says nothing. */
const LEAST_SMOOTHED = 12;
/** Fewer values have a dot each. */
const LEAST_WITHOUT_DOTS = 40;
const HEIGHT = 210;
const [LEFT, RIGHT, TOP, BOTTOM] = [52, 12, 6, 34];
const LEAST_DRAG = 5;

/**
 * @typedef {{run: number, name: string, x: number[], y: (number | null)[]}} Line
 * @typedef {{smoothing: number, axis: "step" | "hours"}} Options
 * @typedef {{lines: Line[], options: Options, zoom: [number, number] | null}} Chart
 */

/** @type {WeakMap<Element, Chart>} What each node shows. */
const charts = new WeakMap();
const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => draw(target)));

/** The colour of a run in every view. @param {number} run */
export function runColour(run) {
  return `var(--run-${run % RUN_COLOURS})`;
}

/**
 * @param {HTMLElement} node
 * @param {Line[]} lines One per run.
 * @param {Options} options
 */
export function drawLines(node, lines, options) {
  const zoom = charts.get(node)?.zoom ?? null;
  charts.set(node, { lines, options, zoom });
  draw(node);
  resized.observe(node);
}

/** @param {Element} node */
function draw(node) {
  const chart = /** @type {Chart} */ (charts.get(node));
  const { smoothing, axis } = chart.options;
  const width = node.clientWidth;
  if (!width) return;
  const drawn = chart.lines.map((line) => {
    const smoothed = smoothing > 0 && line.y.length >= LEAST_SMOOTHED;
    return { ...line, raw: line.y, smoothed, y: smoothed ? smooth(line.y, smoothing) : line.y };
  });
  const [x0, x1] = chart.zoom ?? range(drawn.flatMap((line) => line.x));
  const shown = drawn.flatMap((line) =>
    [...line.raw, ...line.y].filter((_, i) => inside(line.x[i % line.x.length], x0, x1)),
  );
  const [low, high] = range(/** @type {number[]} */ (shown.filter((value) => value !== null)));
  const [y0, y1] = [low - (high - low) * 0.05, high + (high - low) * 0.05];
  const [wide, tall] = [width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM];
  const across = (/** @type {number} */ x) => ((x - x0) / (x1 - x0)) * wide;
  const down = (/** @type {number} */ y) => ((y1 - y) / (y1 - y0)) * tall;

  /** @param {number[]} x @param {(number | null)[]} y @returns {string} Gaps where a value is missing. */
  const path = (x, y) =>
    y
      .map((value, i) =>
        value === null
          ? ""
          : `${i && y[i - 1] !== null ? "L" : "M"}${across(x[i]).toFixed(1)} ${down(value).toFixed(1)}`,
      )
      .join("");
  const curves = drawn.flatMap(({ run, x, y, raw, smoothed }) => {
    const style = { stroke: runColour(run), fill: runColour(run) };
    return [
      smoothed && el("svg:path.trace.raw", { d: path(x, raw), style: { stroke: style.stroke } }),
      el("svg:path.trace", { d: path(x, y), style: { stroke: style.stroke } }),
      y.length < LEAST_WITHOUT_DOTS &&
        y.map(
          (value, i) =>
            value !== null && el("svg:circle", { cx: across(x[i]), cy: down(value), r: 2, style }),
        ),
    ].flat();
  });
  const marks = el("svg:g.marks");
  const plane = el("svg:svg", { x: LEFT, y: TOP, width: wide, height: tall }, curves, marks);
  const svg = el(
    "svg:svg",
    { width, height: HEIGHT },
    ticks(y0, y1, 6).map((at) => [
      el("svg:line", { x1: LEFT, x2: width - RIGHT, y1: TOP + down(at), y2: TOP + down(at) }),
      el("svg:text", { x: LEFT - 6, y: TOP + down(at) + 4, "text-anchor": "end" }, number(at)),
    ]),
    ticks(x0, x1, width / 80).map((at) =>
      el(
        "svg:text",
        { x: LEFT + across(at), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" },
        number(at),
      ),
    ),
    el("svg:text", { x: LEFT + wide / 2, y: HEIGHT - 5, "text-anchor": "middle" }, axis),
    plane,
  );
  const values = el("div.values", { hidden: "" });
  fill(node, svg, values);

  /** @type {number | null} Where a drag began. */
  let from = null;
  const at = (/** @type {PointerEvent} */ event) =>
    Math.max(0, Math.min(wide, event.clientX - svg.getBoundingClientRect().left - LEFT));
  svg.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
    const here = at(event);
    const near = drawn.map(({ x }) =>
      x.reduce((best, _, i) => (Math.abs(across(x[i]) - here) < Math.abs(across(x[best]) - here) ? i : best), 0),
    );
    const start = from ?? here;
    fill(
      marks,
      el("svg:rect", { x: Math.min(start, here), width: Math.abs(here - start), height: tall }),
      el("svg:line", { x1: here, x2: here, y1: 0, y2: tall }),
    );
    values.hidden = false;
    values.style[here < wide / 2 ? "left" : "right"] = `${(here < wide / 2 ? LEFT + here : width - LEFT - here) + 10}px`;
    values.style[here < wide / 2 ? "right" : "left"] = "auto";
    fill(
      values,
      drawn.map(({ run, name, x, y }, i) =>
        el(
          "div",
          null,
          el("i", { style: { background: runColour(run) } }),
          `${name} `,
          el("b", null, number(y[near[i]])),
          ` at ${axis} ${number(x[near[i]])}`,
        ),
      ),
    );
  });
  svg.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
    from = at(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointerup", (/** @type {PointerEvent} */ event) => {
    const ends = [from ?? 0, at(event)].sort((a, b) => a - b);
    from = null;
    if (ends[1] - ends[0] < LEAST_DRAG) return;
    const [first, last] = ends.map((end) => x0 + (end / wide) * (x1 - x0));
    chart.zoom = [first, last];
    draw(node);
  });
  svg.addEventListener("pointerleave", () => {
    fill(marks);
    values.hidden = true;
  });
  svg.addEventListener("dblclick", () => {
    chart.zoom = null;
    draw(node);
  });
}

/** @param {number} x @param {number} low @param {number} high */
function inside(x, low, high) {
  return x >= low && x <= high;
}

/** The least and the greatest, apart from each other. @param {number[]} values */
function range(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (low > high) return [0, 1];
  const room = low < high ? 0 : Math.abs(low) / 10 || 1;
  return [low - room, high + room];
}

/** Round numbers in a range. @param {number} low @param {number} high @param {number} most */
function ticks(low, high, most) {
  const least = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= least) ?? least;
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  return found;
}
