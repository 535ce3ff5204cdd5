// Modal dialogs: the browser holds the focus in the topmost, gives it back where it was, and closes it on Escape.

import { el } from "./dom.js";

/**
 * Ask the person. `act(form)` does what the dialog is for: while it works the dialog stays, and an error is shown in it.
 * Resolves with what `act` returns; with null when the person does not want to.
 */
export function ask({ title, body, yes, danger = false, act }) {
  const error = el("p", { class: "bad line", role: "alert" });
  const yesButton = el("button", { type: "submit", class: danger ? "danger" : "" }, yes);
  const noButton = el("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel");
  const form = el("form", { method: "dialog" }, el("h2", {}, title), body, error, el("div", { class: "choices" }, noButton, yesButton));
  const dialog = el("dialog", { "aria-label": title }, form);
  let found = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    yesButton.disabled = true;
    error.textContent = "";
    try {
      found = await act(new FormData(form));
      dialog.close();
    } catch (problem) {
      error.textContent = problem.message;
      yesButton.disabled = false;
    }
  });
  return opened(dialog, form.querySelector("input") ?? noButton, () => found);
}

/** Show something, with a button for each command that fits it: [text, act]. A command closes the dialog and asks in its own. */
export function show({ title, body, commands }) {
  let chosen = null;
  const choose = (act) => { chosen = act; dialog.close(); };
  const buttons = commands.map(([text, act]) => el("button", { type: "button", onclick: () => choose(act) }, text));
  const close = el("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Close");
  const dialog = el("dialog", { "aria-label": title }, el("h2", {}, title), body, el("div", { class: "choices" }, close, buttons));
  return opened(dialog, close, () => chosen?.());
}

/** Open a dialog with the focus at `first`; resolves with what `result` gives once it is closed. */
function opened(dialog, first, result) {
  const opener = document.activeElement;
  document.body.append(dialog);
  dialog.showModal();
  first.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (!opener.isConnected) again(opener)?.focus(); // it was drawn again meanwhile
      else if (opener.disabled) opener.parentElement.querySelector("button:not(:disabled):not([hidden])")?.focus();
      resolve(result());
    });
  });
}

const again = (gone) => (gone.dataset.key === undefined ? null : document.querySelector(`[data-key="${CSS.escape(gone.dataset.key)}"]`));

/** Return a line to type into. */
export const field = (name, label, attributes = {}) => el("label", {}, label, el("input", { name, type: "text", maxlength: 500, autocomplete: "off", ...attributes }));

/** Return a choice of several: [value, label]; the first is chosen. */
export const choice = (name, options) => el("fieldset", {}, options.map(([value, label], index) =>
  el("label", {}, el("input", { type: "radio", name, value, checked: index === 0 }), ` ${label}`)));

/** Return facts: [name, value]; those without a value are left out. */
export const facts = (pairs) => el("dl", {}, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
  .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
