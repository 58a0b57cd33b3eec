/** The run as a whole: how it stands, its summary where the page has one, its configuration. */

import { flat } from "./compare.js";
import { el, fill } from "./dom.js";
import { count } from "./format.js";
import { oneFile } from "./one_file.js";

/**
 * @param {HTMLElement} root
 * @param {Record<string, string>} params
 * @param {import("./main.js").App} app
 * @returns {import("./main.js").Shown}
 */
export function overview(root, params, app) {
  const run = Number(params.run ?? 0);
  function draw() {
    const info = app.runs[run];
    const last = app.feeds[run].lines.at(-1)?.step;
    fill(
      root,
      el(
        "div.page",
        null,
        el("h1", null, info.name),
        el(
          "p",
          null,
          el(`span.state.${info.state}`, null, info.state),
          last === undefined ? ". No step is logged." : `. The last step logged is ${last}.`,
          info.ends_at && ` It is expected to end at ${info.ends_at}.`,
          oneFile &&
            ` Written ${oneFile.written} with ${count(oneFile.metrics.lines.length)} of ` +
              `${count(oneFile.num_steps)} lines of metrics.jsonl and ` +
              `${count(oneFile.trajectories.length)} of ${count(oneFile.num_trajectories)} trajectories.`,
        ),
        info.error && el("div.card.bad", null, el("pre", null, info.error)),
        info.summary && [el("h2", null, "Summary"), table(info.summary)],
        el("h2", null, "Configuration"),
        table([...flat(info.config)]),
      ),
    );
  }
  draw();
  return { news: draw };
}

/** @param {string[][]} rows */
function table(rows) {
  return el(
    "table.pairs",
    null,
    rows.map((cells) => el("tr", null, cells.map((cell) => el("td", null, cell)))),
  );
}
