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
    try {
      found = await act(new FormData(form));
      dialog.close();
    } catch (problem) {
      error.textContent = problem.message;
      yesButton.disabled = false;
    }
  });
  document.body.append(dialog);
  dialog.showModal();
  (form.querySelector("input") ?? noButton).focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => { dialog.remove(); resolve(found); });
  });
}

/** Return a line to type into. */
export const field = (name, label, attributes = {}) => el("label", {}, label, el("input", { name, type: "text", maxlength: 500, autocomplete: "off", ...attributes }));

/** Return a choice of several: [value, label]; the first is chosen. */
export const choice = (name, options) => el("fieldset", {}, options.map(([value, label], index) =>
  el("label", {}, el("input", { type: "radio", name, value, checked: index === 0 }), ` ${label}`)));
