/** Answers the page's requests from the data that is in the page, where it is a single file. */

import { conditions, CONDITION } from "./filter_text.js";

const block = document.getElementById("one-file");
/** The data of the file; null: the page has a server. @type {any} */
export const oneFile = block && JSON.parse(block.textContent ?? "");

const IDENTITY = ["step", "phase", "task_id", "rollout_index"];

/** @param {string} path @param {Record<string, any>} params */
export function answer(path, params) {
  const rows = oneFile.trajectories;
  switch (path.split("/").at(-1)) {
    case "runs":
      return { runs: oneFile.runs };
    case "metrics":
      return params.cursor === "all"
        ? { lines: [], damaged: 0, cursor: "all" }
        : { ...oneFile.metrics, cursor: "all" };
    case "facets":
      return {
        steps: rows,
        stops: [...new Set(rows.map((/** @type {any} */ row) => row.stop))].sort(),
        tools: [...new Set(rows.flatMap((/** @type {any} */ row) => row.tools))].sort(),
      };
    case "trajectories":
      return page(rows, params);
    case "trajectory":
      return one(rows, params);
    default:
      throw new Error(`this file has no ${path}: use treadle view`);
  }
}

/** @param {any[]} rows @param {Record<string, any>} params */
function page(rows, { filter, sort, limit, offset }) {
  const rest = filter.replace(CONDITION, "").trim();
  if (rest) throw new Error(`${rest} is not a condition: write it as reward<0.5`);
  const wanted = conditions(filter);
  const found = rows.filter((row) => wanted.every((condition) => passes(row, condition)));
  const keys = [...(sort ? [sort] : []), ...IDENTITY];
  found.sort((a, b) => keys.reduce((order, key) => order || compare(a, b, key), 0));
  return { rows: found.slice(offset, offset + limit), total: found.length };
}

/** Missing values are last. @param {any} a @param {any} b @param {string} key */
function compare(a, b, key) {
  const name = key.replace(/^-/, "");
  const [x, y] = [a[name], b[name]];
  if (x === null || y === null) return Number(x === null) - Number(y === null);
  return (x < y ? -1 : x > y ? 1 : 0) * (name === key ? 1 : -1);
}

/** As filters are described in trajectories.md. @param {any} row @param {any} condition */
function passes(row, { column, operator, value }) {
  const found =
    column === "tool"
      ? row.tools
      : column === "finding"
        ? row.findings.map((/** @type {any} */ one) => one.kind)
        : column === "text"
          ? JSON.stringify(row.messages) + (row.error ?? "")
          : row[column];
  if (found === undefined) throw new Error(`there is no column ${column} to filter by`);
  const positive = operator === "!=" ? "=" : operator.replace("!", "");
  return holds(found, positive, value) !== operator.startsWith("!");
}

/** @param {any} found @param {string} operator @param {string} value */
function holds(found, operator, value) {
  const list = Array.isArray(found);
  if (value === "") return found === null || (list && !found.length);
  if (found === null) return false;
  if (operator === "~") return String(found).toLowerCase().includes(value.toLowerCase());
  if (operator === "=")
    return list ? found.includes(value) : typeof found === "number" ? found === +value : found === value;
  if (operator === "<") return found < +value;
  if (operator === "<=") return found <= +value;
  return operator === ">" ? found > +value : found >= +value;
}

/** @param {any[]} rows @param {Record<string, any>} params */
function one(rows, params) {
  const found = rows.find((row) => IDENTITY.every((key) => String(row[key]) === params[key]));
  if (!found) throw new Error("this file does not hold it: use treadle view");
  const same = rows.filter((row) => row.task_id === found.task_id && row.phase === found.phase);
  return {
    ...found,
    group: same.filter((row) => row.step === found.step),
    other_steps: same.filter((row) => row.step !== found.step),
  };
}
