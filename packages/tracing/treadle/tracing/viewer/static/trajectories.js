/** The table of trajectories: filter, sort and pages, each answered by a query over the files. */

import { get } from "./api.js";
import { COLUMNS } from "./columns.js";
import { el, empty, fill, select } from "./dom.js";
import { valueOf, withCondition } from "./filter_text.js";
import { count } from "./format.js";
import { go, link, note } from "./router.js";

const PAGE = 100;
const TYPING_MS = 300;

/**
 * @param {HTMLElement} root
 * @param {Record<string, string>} params
 * @param {import("./main.js").App} app
 * @returns {import("./main.js").Shown}
 */
export function trajectories(root, params, app) {
  const run = Number(params.run ?? 0);
  let text = params.filter ?? "";
  let sort = params.sort ?? "";
  let offset = Number(params.offset ?? 0);
  let total = 0;
  let selected = Number(params.selected ?? 0);
  /** @type {import("./columns.js").Row[]} */
  let rows = [];
  let asked = 0;
  let timer = 0;

  const input = el("input.filter", {
    type: "search",
    value: text,
    spellcheck: "false",
    "aria-label": "Filter",
    placeholder: 'Filter, as reward<0.5 tool=python error!= text~"not found"',
    oninput: (event) => {
      clearTimeout(timer);
      timer = setTimeout(() => filter(event.target.value), TYPING_MS);
    },
  });
  const quick = el("div.quick");
  const problem = el("p.error", { hidden: "" });
  const body = el("div.table-box");
  const pager = el("div.pager");
  fill(root, el("div.page", null, el("div.tools", null, input), quick, problem, body, pager));

  /** @param {string} wanted */
  function filter(wanted) {
    [text, offset, selected] = [wanted, 0, 0];
    if (input.value !== wanted) input.value = wanted;
    load();
  }

  /** @param {any} error */
  function fail(error) {
    problem.hidden = false;
    fill(problem, error.message);
  }

  /** @param {string} column */
  function sortBy(column) {
    sort = sort === `-${column}` ? column : sort === column ? "" : `-${column}`;
    [offset, selected] = [0, 0];
    load();
  }

  async function load() {
    note({ filter: text, sort, offset: offset || null, selected: null });
    const mine = ++asked;
    body.classList.add("loading");
    try {
      const found = await get(`runs/${run}/trajectories`, {
        filter: text,
        sort,
        limit: PAGE,
        offset,
      });
      if (mine !== asked || !root.isConnected) return;
      [rows, total] = [found.rows, found.total];
      problem.hidden = true;
      draw();
      drawQuick();
    } catch (error) {
      if (mine === asked) fail(error);
    } finally {
      if (mine === asked) body.classList.remove("loading");
    }
  }

  /** @param {number} i */
  const address = (i) => ({
    run: run || null,
    step: rows[i].step,
    phase: rows[i].phase,
    task: rows[i].task_id,
    index: rows[i].rollout_index,
    filter: text,
    sort,
    pos: offset + i,
  });

  function draw() {
    if (!rows.length) {
      fill(
        body,
        text
          ? empty(
              "No trajectory passes the filter",
              "Take a condition away, or press / and change it.",
            )
          : empty(
              "No trajectories yet",
              "They appear when a step has ended and its file is written.",
            ),
      );
      fill(pager);
      return;
    }
    const head = COLUMNS.map(([label, column, kind]) => {
      const order = sort === column ? "ascending" : sort === `-${column}` ? "descending" : null;
      return el(
        "th",
        { class: kind, "aria-sort": order, scope: "col" },
        column
          ? el(
              "button.quiet",
              { type: "button", onclick: () => sortBy(column) },
              label,
              order === "ascending" ? " ↑" : order ? " ↓" : "",
            )
          : label,
      );
    });
    const lines = rows.map((row, i) =>
      el(
        "tr",
        {
          "data-row": i,
          "aria-selected": String(i === selected),
          onclick: () => go("trajectory", address(i)),
        },
        COLUMNS.map(([, column, kind, show]) =>
          el(
            "td",
            { class: kind },
            column === "task_id"
              ? el("a", { href: link("trajectory", address(i)) }, show(row))
              : show(row),
          ),
        ),
      ),
    );
    fill(
      body,
      el("table.rows", null, el("thead", null, el("tr", null, head)), el("tbody", null, lines)),
    );
    const pages = Math.ceil(total / PAGE);
    const page = Math.floor(offset / PAGE);
    /** @param {string} label @param {string} title @param {number} to */
    const button = (label, title, to) =>
      el(
        "button",
        {
          type: "button",
          title,
          disabled: to < 0 || to >= pages || to === page,
          onclick: () => turn(to),
        },
        label,
      );
    fill(
      pager,
      button("«", "First page", 0),
      button("‹", "Previous page (←)", page - 1),
      el(
        "span",
        null,
        `${count(offset + 1)} – ${count(offset + rows.length)} of ${count(total)} ${total === 1 ? "trajectory" : "trajectories"}`,
      ),
      button("›", "Next page (→)", page + 1),
      button("»", "Last page", pages - 1),
    );
  }

  /** @param {number} page */
  function turn(page) {
    if (page < 0 || page * PAGE >= total) return;
    [offset, selected] = [page * PAGE, 0];
    load();
    body.scrollTop = 0;
  }

  /** @param {number} by */
  function move(by) {
    selected = Math.max(0, Math.min(rows.length - 1, selected + by));
    for (const row of /** @type {any} */ (body.querySelectorAll("tr[data-row]"))) {
      row.setAttribute("aria-selected", String(Number(row.dataset.row) === selected));
    }
    body.querySelector('[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
    note({ selected: selected || null });
  }

  /** @type {any} */
  let facets = null;

  function drawQuick() {
    if (!facets) return;
    /** @param {string} label @param {string} column @param {string[]} values */
    const choice = (label, column, values) =>
      values.length > 0 &&
      select(
        [["", label], ...values.map((v) => /** @type {[string, string]} */ ([v, v]))],
        valueOf(text, column, "=") ?? "",
        (value) => filter(withCondition(text, column, "=", value || null)),
        { "aria-label": label },
      );
    /** @param {string} label @param {string} column @param {string} operator @param {string} value */
    const toggle = (label, column, operator, value) => {
      const on = valueOf(text, column, operator) === value;
      return el(
        "button.chip",
        {
          type: "button",
          "aria-pressed": String(on),
          onclick: () => filter(withCondition(text, column, operator, on ? null : value)),
        },
        label,
      );
    };
    const steps = [...new Set(facets.steps.map((s) => String(s.step)))];
    const phases = [...new Set(facets.steps.map((s) => s.phase))];
    fill(
      quick,
      choice("any step", "step", steps),
      choice("any phase", "phase", phases),
      choice("any stop reason", "stop", facets.stops),
      choice("any tool", "tool", facets.tools),
      toggle("errors", "error", "!=", ""),
      toggle("drift", "drift", ">", "0"),
      toggle("reward above 0", "reward", ">", "0"),
    );
  }

  const learn = async () => {
    facets = await get(`runs/${run}/facets`);
    drawQuick();
  };
  learn().catch(fail);
  load();
  const step = () => app.feeds[run]?.last("time/step_s")?.step;
  let seen = step();
  return {
    // A new step has new trajectories; the page that is read stays as it is, unless it is empty.
    news: () => {
      if (step() !== seen) {
        seen = step();
        learn().catch(fail);
        if (!rows.length) load();
      }
    },
    leave: () => clearTimeout(timer),
    keys: [
      { key: "/", does: "filter", run: () => input.focus() },
      { key: "j", does: "next row", run: () => move(1) },
      { key: "k", does: "previous row", run: () => move(-1) },
      { key: "ArrowDown", does: "next row", run: () => move(1) },
      { key: "ArrowUp", does: "previous row", run: () => move(-1) },
      {
        key: "Enter",
        does: "open the trajectory",
        run: () => rows[selected] && go("trajectory", address(selected)),
      },
      { key: "ArrowRight", does: "next page", run: () => turn(Math.floor(offset / PAGE) + 1) },
      { key: "ArrowLeft", does: "previous page", run: () => turn(Math.floor(offset / PAGE) - 1) },
    ],
  };
}
