// One modal dialog: the browser holds the focus in it, gives it back where it was, and closes it on Escape.

import { byId, el } from "./dom.js";

let waiting = Promise.resolve();

/**
 * Ask the person, after whatever is being asked already. `act(form)` does what the dialog is for: while it works the dialog stays,
 * and an error is shown in it. Resolves with what `act` returns; with null when the person does not want to.
 */
export function ask(question) {
  const asked = waiting.then(() => show(question));
  waiting = asked.catch(() => null);
  return asked;
}

function show({ title, body, yes, danger = false, act }) {
  const [dialog, form, error, yesButton, noButton] = ["dialog", "dialog-form", "dialog-error", "dialog-yes", "dialog-no"].map(byId);
  byId("dialog-title").textContent = title;
  byId("dialog-body").replaceChildren(...body);
  error.textContent = "";
  yesButton.textContent = yes;
  yesButton.className = danger ? "danger" : "";
  yesButton.disabled = false;
  return new Promise((resolve) => {
    let found = null;
    form.onsubmit = async (event) => {
      event.preventDefault();
      yesButton.disabled = true;
      try {
        found = await act(new FormData(form));
        dialog.close();
      } catch (problem) {
        error.textContent = problem.message;
        yesButton.disabled = false;
      }
    };
    noButton.onclick = () => dialog.close();
    dialog.onclose = () => resolve(found);
    dialog.showModal();
    (form.querySelector("input") ?? noButton).focus();
  });
}

/** Return a line to type into. */
export const field = (name, label, attributes = {}) => el("label", {}, label, el("input", { name, type: "text", maxlength: 500, autocomplete: "off", ...attributes }));

/** Return a choice of several: [value, label]; the first is chosen. */
export const choice = (name, options) => el("fieldset", {}, options.map(([value, label], index) =>
  el("label", {}, el("input", { type: "radio", name, value, checked: index === 0 }), ` ${label}`)));
