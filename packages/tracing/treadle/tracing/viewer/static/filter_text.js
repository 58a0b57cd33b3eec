/** Edits the text of a filter, so that buttons and typing say the same thing. */

export const CONDITION = /([^\s=!<>~"]*)(!=|<=|>=|!~|[=<>~])("(?:[^"\\]|\\["\\])*"|[^\s"]*)(?=\s|$)/g;

/**
 * @param {string} text
 * @returns {{column: string, operator: string, value: string, text: string}[]}
 */
export function conditions(text) {
  return [...text.matchAll(CONDITION)].map(([whole, column, operator, value]) => ({
    column,
    operator,
    text: whole,
    value: value.startsWith('"') ? value.slice(1, -1).replace(/\\(["\\])/g, "$1") : value,
  }));
}

/**
 * Returns the text with one condition on a column with an operator, or with none.
 * @param {string} text
 * @param {string} column
 * @param {string} operator
 * @param {string | null} value Null: without the condition.
 */
export function withCondition(text, column, operator, value) {
  const kept = conditions(text)
    .filter((c) => c.column !== column || c.operator !== operator)
    .map((c) => c.text);
  if (value !== null) kept.push(`${column}${operator}${quoted(value)}`);
  return kept.join(" ");
}

/**
 * @param {string} text
 * @param {string} column
 * @param {string} operator
 * @returns {string | null} The value of the condition; null: there is none.
 */
export function valueOf(text, column, operator) {
  return (
    conditions(text).find((c) => c.column === column && c.operator === operator)?.value ?? null
  );
}

/** @param {string} value */
function quoted(value) {
  return /[\s"]/.test(value) ? `"${value.replace(/["\\]/g, "\\$&")}"` : value;
}
