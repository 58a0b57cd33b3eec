/** The messages of a trajectory, with what each completion and each tool call took. */

import { el, empty } from "./dom.js";
import { plural, seconds } from "./format.js";
import { oneFile } from "./one_file.js";

const LONG = 6000;

/** @param {any} found @param {number} run Its place among the runs, for its images. */
export function conversation(found, run) {
  if (!found.messages.length) return empty("No messages", "The file has none for this trajectory.");
  const calls = spansOf(found, "tool");
  const turns = spansOf(found, "generate");
  const answered = found.messages.filter((/** @type {any} */ m) => m.role === "tool").length;
  const said = found.messages
    .slice(firstOwn(found))
    .filter((/** @type {any} */ m) => m.role === "assistant").length;
  // Spans belong to messages by their order, where there is one of each.
  const ofCall = calls.length === answered ? [...calls] : [];
  const ofTurn = turns.length === said ? [...turns] : [];
  const first = firstOwn(found);
  return el(
    "div.messages",
    null,
    found.messages.map((/** @type {any} */ message, /** @type {number} */ i) => {
      const span =
        message.role === "tool"
          ? ofCall.shift()
          : message.role === "assistant" && i >= first
            ? ofTurn.shift()
            : null;
      return card(message, span, i >= first && message.role === "assistant", run);
    }),
  );
}

/** @param {any} found @param {string} name */
function spansOf(found, name) {
  return found.trace
    .filter((/** @type {any} */ span) => span.name === name)
    .sort((/** @type {any} */ a, /** @type {any} */ b) => a.start_unix_ns - b.start_unix_ns);
}

/** The place of the first message that the model sampled: after the last user message before it. */
function firstOwn(/** @type {any} */ found) {
  const last = found.messages.findIndex(
    (/** @type {any} */ m) => m.role === "user" && m.content === found.prompt,
  );
  return last + 1;
}

/**
 * @param {any} message
 * @param {any} span
 * @param {boolean} sampled
 * @param {number} run
 */
function card(message, span, sampled, run) {
  const failed = span?.error;
  const label = message.role === "tool" && message.name ? `tool: ${message.name}` : message.role;
  return el(
    `article.message.${roleClass(message.role)}${sampled ? ".sampled" : ""}`,
    null,
    el(
      "header",
      null,
      el("b", null, label),
      sampled && el("span.tag.accent", null, "sampled"),
      message.role === "tool" && el("span.tag", null, "observed"),
      el("span.grow"),
      span &&
        el(
          "span.muted",
          null,
          [
            span.attributes.tokens && plural(span.attributes.tokens, "token"),
            seconds(span.duration_ns / 1e9),
          ]
            .filter(Boolean)
            .join(", "),
        ),
    ),
    message.reasoning &&
      el("details", { open: "" }, el("summary", null, "Reasoning"), text(message.reasoning)),
    (message.images ?? []).map((/** @type {string} */ name) =>
      oneFile
        ? el("p.muted", null, `image ${name}`)
        : el("img.shown", {
            src: `/api/runs/${run}/images/${encodeURIComponent(name)}`,
            alt: "image that the model was shown",
            loading: "lazy",
          }),
    ),
    message.content ? text(content(message.content)) : null,
    (message.tool_calls ?? []).map((/** @type {any} */ call) =>
      el(
        "div.call",
        null,
        el(
          "div",
          null,
          el("span.tag.accent", null, call.name),
          el("span.muted", null, " called with"),
        ),
        el("pre", null, args(call.arguments)),
      ),
    ),
    failed && el("p.error", null, failed),
  );
}

/** @param {string} role */
function roleClass(role) {
  return ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
}

/** @param {any} value */
function content(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}

/** A program is shown as it is written, and other arguments as JSON. @param {any} values */
function args(values) {
  const entries = Object.entries(values ?? {});
  if (entries.some(([, value]) => typeof value === "string" && value.includes("\n"))) {
    return entries.map(([key, value]) => `${key}:\n${content(value)}`).join("\n\n");
  }
  return JSON.stringify(values, null, 2);
}

/** @param {string} value */
function text(value) {
  if (value.length <= LONG) return el("pre.said", null, value);
  const rest = el("pre.said", null, value.slice(0, LONG));
  const more = el(
    "button",
    {
      type: "button",
      onclick: () => {
        rest.replaceWith(el("pre.said", null, value));
        more.remove();
      },
    },
    `Show the other ${plural(value.length - LONG, "character")}`,
  );
  return el("div", null, rest, more);
}
