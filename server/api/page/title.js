import { html } from "./vendor/preact-htm.js";

/** A card's heading with its main figure. */
export function Title({ text, children }) {
  return html`<div class="title"><h2>${text}</h2><p class="figure">${children}</p></div>`;
}
