/**
 * Draws trajectories as bars on a canvas, because a step may have thousands: one row each, its
 * spans in the colour of their cause, above it how many ran at each time.
 */

import { colour, el, fill } from "./dom.js";
import { seconds } from "./format.js";
import { causeOf } from "./trace.js";

const MAX_HEIGHT = 12000;
const CURVE = 56;
const AXIS = 22;
const LEFT = 8;
/** Drawn in this order, so that what is more special lies on top. */
const LAYERS = [
  "tools",
  "interaction",
  "reward",
  "generate",
  "route",
  "tool",
  "prefill",
  "decode",
  "queue",
  "paused",
];

/**
 * @param {any[]} bars
 * @param {(bar: any) => void} open
 */
export function drawBars(bars, open) {
  const height = Math.max(3, Math.min(16, Math.floor(MAX_HEIGHT / bars.length)));
  const shown = bars.slice(0, Math.floor(MAX_HEIGHT / height));
  const canvas = /** @type {HTMLCanvasElement} */ (
    el("canvas", { role: "img", "aria-label": `Timeline of ${bars.length} trajectories` })
  );
  const tip = el("div.tip", { hidden: "" });
  const end = Math.max(...bars.map((bar) => bar.start_s + bar.duration_s), 1e-6);
  const top = CURVE + AXIS;
  /** @param {number} s */
  const x = (s) => LEFT + (s / end) * (canvas.clientWidth - 2 * LEFT);

  function draw() {
    const scale = devicePixelRatio;
    const width = canvas.clientWidth;
    if (!width) return;
    canvas.style.height = `${top + shown.length * height + 4}px`;
    canvas.width = width * scale;
    canvas.height = (top + shown.length * height + 4) * scale;
    const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    pen.scale(scale, scale);
    running(pen);
    axis(pen, width);
    const shades = new Map();
    const shade = (/** @type {string} */ name) => {
      if (!shades.has(name)) shades.set(name, colour(name));
      return shades.get(name);
    };
    shown.forEach((bar, row) => {
      const y = top + row * height;
      const thick = Math.max(2, height - (height > 6 ? 3 : 1));
      pen.fillStyle = shade("cause-other");
      pen.fillRect(
        x(bar.start_s),
        y,
        Math.max(1, x(bar.start_s + bar.duration_s) - x(bar.start_s)),
        thick,
      );
      const spans = bar.spans
        .filter((/** @type {any} */ s) => LAYERS.includes(s.name))
        .sort(
          (/** @type {any} */ a, /** @type {any} */ b) =>
            LAYERS.indexOf(a.name) - LAYERS.indexOf(b.name),
        );
      for (const span of spans) {
        pen.fillStyle = shade(span.error ? "bad" : `cause-${causeOf(span.name)}`);
        pen.fillRect(
          x(span.start_s),
          y,
          Math.max(1, x(span.start_s + span.duration_s) - x(span.start_s)),
          thick,
        );
      }
      if (bar.error) {
        pen.fillStyle = shade("bad");
        pen.fillRect(x(bar.start_s + bar.duration_s), y, 3, thick);
      }
    });
  }

  /** How many trajectories run at each time. @param {CanvasRenderingContext2D} pen */
  function running(pen) {
    const events = bars
      .flatMap((bar) => [
        [bar.start_s, 1],
        [bar.start_s + bar.duration_s, -1],
      ])
      .sort((a, b) => a[0] - b[0] || b[1] - a[1]);
    let now = 0;
    let most = 1;
    for (const [, by] of events) most = Math.max(most, (now += by));
    const y = (/** @type {number} */ n) => CURVE - 2 - (n / most) * (CURVE - 18);
    pen.beginPath();
    pen.moveTo(x(0), y(0));
    now = 0;
    for (const [time, by] of events) {
      pen.lineTo(x(time), y(now));
      pen.lineTo(x(time), y((now += by)));
    }
    pen.closePath();
    pen.fillStyle = colour("accent-soft");
    pen.fill();
    pen.strokeStyle = colour("accent");
    pen.stroke();
    pen.fillStyle = colour("muted");
    pen.font = "11px system-ui, sans-serif";
    pen.fillText(`running at once, at most ${most}`, LEFT, 11);
  }

  /** @param {CanvasRenderingContext2D} pen @param {number} width */
  function axis(pen, width) {
    const wanted = end / Math.max(2, width / 110);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const unit = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted) ?? 10 * power;
    pen.font = "11px system-ui, sans-serif";
    for (let t = 0; t <= end; t += unit) {
      pen.fillStyle = colour("line");
      pen.fillRect(x(t), CURVE, 1, shown.length * height + AXIS);
      pen.fillStyle = colour("muted");
      if (x(t) < width - 40) pen.fillText(t === 0 ? "0" : seconds(t), x(t) + 4, CURVE + 14);
    }
  }

  /** @param {MouseEvent} event */
  const at = (event) => shown[Math.floor((event.offsetY - top) / height)];
  canvas.addEventListener("mousemove", (event) => {
    const bar = at(event);
    canvas.style.cursor = bar ? "pointer" : "default";
    tip.hidden = !bar;
    if (!bar) return;
    const time = ((event.offsetX - LEFT) / (canvas.clientWidth - 2 * LEFT)) * end;
    const under = bar.spans.filter(
      (/** @type {any} */ s) =>
        s.name !== "turn" && s.start_s <= time && time <= s.start_s + s.duration_s,
    );
    fill(
      tip,
      el("b", null, `${bar.task_id} #${bar.rollout_index}`),
      el("div", null, `${seconds(bar.duration_s)}, ${bar.stop}`),
      under.map((/** @type {any} */ s) =>
        el(
          "div.muted",
          null,
          `${s.server ? "server: " : ""}${s.name} ${s.label ?? ""} ${seconds(s.duration_s)}`,
        ),
      ),
    );
    tip.style.left = `${Math.min(event.offsetX + 14, canvas.clientWidth - 230)}px`;
    tip.style.top = `${event.offsetY + 14}px`;
  });
  canvas.addEventListener("mouseleave", () => {
    tip.hidden = true;
  });
  canvas.addEventListener("click", (event) => {
    const bar = at(event);
    if (bar) open(bar);
  });
  new ResizeObserver(draw).observe(canvas);
  const left = bars.length - shown.length;
  return el(
    "div.timeline",
    null,
    left > 0 &&
      el("p.muted", null, `The first ${shown.length} of ${bars.length} in this order are drawn.`),
    canvas,
    tip,
  );
}
