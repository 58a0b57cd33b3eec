/** Line charts of metrics with Plotly, which is loaded when the first one is drawn. */

import { colour, el } from "./dom.js";
import { smooth } from "./feed.js";

const RUN_COLOURS = 8;
/** Fewer values are drawn as they are: the mean of a few says nothing. */
const LEAST_SMOOTHED = 12;
/** @type {Promise<any> | null} */
let loading = null;

/** The colour of a run in every view. @param {number} run */
export function runColour(run) {
  return colour(`run-${run % RUN_COLOURS}`);
}

/** @param {string} version */
export function loadPlotly(version) {
  loading ??= new Promise((resolve, reject) => {
    const script = el("script", { src: `/plotly/${version}.js` });
    script.addEventListener("load", () => resolve(/** @type {any} */ (window).Plotly));
    script.addEventListener("error", () => {
      loading = null;
      reject(new Error("Plotly could not be loaded from the viewer"));
    });
    document.head.append(script);
  });
  return loading;
}

/**
 * @typedef {{run: number, name: string, x: number[], y: (number | null)[]}} Line
 * @param {any} Plotly
 * @param {HTMLElement} node
 * @param {Line[]} lines One per run.
 * @param {{smoothing: number, axis: "step" | "hours"}} options
 */
export function drawLines(Plotly, node, lines, { smoothing, axis }) {
  const traces = lines.flatMap((line) => {
    const shown = colourOf(line.run);
    const common = {
      x: line.x,
      type: "scatter",
      mode: "lines",
      name: line.name,
      connectgaps: false,
    };
    const smoothed = smoothing > 0 && line.y.length >= LEAST_SMOOTHED;
    const few = line.y.length < 40 ? "lines+markers" : "lines";
    const main = {
      ...common,
      mode: few,
      y: smoothed ? smooth(line.y, smoothing) : line.y,
      line: { color: shown, width: 2 },
      marker: { color: shown, size: 4 },
      hovertemplate: "%{y:.5~g}",
    };
    if (!smoothed) return [main];
    const raw = {
      ...common,
      y: line.y,
      opacity: 0.28,
      hoverinfo: "skip",
      line: { color: shown, width: 1 },
    };
    return [raw, main];
  });
  return Plotly.react(node, traces, layout(axis), {
    displayModeBar: false,
    responsive: true,
    doubleClick: "reset",
  });
}

/** Run colours of one drawing are resolved once. */
const cache = new Map();

/** @param {number} run */
function colourOf(run) {
  const key = `${document.documentElement.dataset.theme} ${run % RUN_COLOURS}`;
  if (!cache.has(key)) cache.set(key, runColour(run));
  return cache.get(key);
}

/** @param {"step" | "hours"} axis */
function layout(axis) {
  const ink = colour("muted");
  const line = colour("line");
  const common = { gridcolor: line, zeroline: false, linecolor: line, tickfont: { size: 11 } };
  return {
    autosize: true,
    height: 210,
    margin: { l: 52, r: 12, t: 6, b: 34 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 11, color: ink },
    showlegend: false,
    hovermode: "x unified",
    hoverlabel: { bgcolor: colour("panel"), bordercolor: line, font: { color: colour("ink") } },
    xaxis: { ...common, title: { text: axis, standoff: 6, font: { size: 11 } } },
    yaxis: { ...common, automargin: true, nticks: 6, exponentformat: "e" },
    dragmode: "zoom",
  };
}
