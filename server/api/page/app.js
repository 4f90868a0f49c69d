// The page: a header, the playground, and the pool, live.

import { html, render, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { useFeed } from "./feed.js";
import { call, onKeyNeeded, setKey } from "./net.js";
import { Playground } from "./playground.js";
import { Pool } from "./pool.js";

const STATES = {
  connecting: "connecting",
  ok: "ready",
  draining: "draining",
  stuck: "stuck",
  dead: "engine dead",
  lost: "no connection",
};

function App() {
  const [plan, setPlan] = useState(null);
  const [model, setModel] = useState("");
  const [chat, setChat] = useState(false);
  const [keyNeeded, setKeyNeeded] = useState(false);
  const [keyTries, tryAgain] = useState(0);
  const { feed, state } = useFeed(keyTries);
  const own = useRef(new Set());

  useEffect(() => onKeyNeeded(() => setKeyNeeded(true)), []);
  useEffect(() => {
    const json = (path) => call(path).then((response) => response.json());
    json("plan").then(setPlan).catch(() => {});
    json("health").then((health) => setModel(health.model ?? "")).catch(() => {});
    json("v1/models").then(() => setChat(true)).catch(() => setChat(false));
  }, [keyTries]);

  const useKey = (value) => {
    setKey(value);
    setKeyNeeded(false);
    tryAgain((tries) => tries + 1);
  };
  return html`
    <${Header} model=${model} state=${state} />
    ${keyNeeded && html`<${KeyForm} submitKey=${useKey} />`}
    <main>
      <${Playground} plan=${plan} model=${model} chat=${chat} own=${own.current} />
      <${Pool} plan=${plan} feed=${feed} own=${own.current} />
    </main>`;
}

function Header({ model, state }) {
  return html`
    <header>
      <img src="page/icon.svg" alt="" width="28" height="28" />
      <h1>tokenteller</h1>
      ${model && html`<span class="model" title="the served model">${model}</span>`}
      <span class="state ${state}" role="status"><i></i>${STATES[state]}</span>
      <${Theme} />
    </header>`;
}

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem("tokenteller.theme") ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("tokenteller.theme", theme);
    dispatchEvent(new Event("themechange"));
  }, [theme]);
  const next = { auto: "light", light: "dark", dark: "auto" }[theme];
  return html`
    <button class="quiet theme" onClick=${() => setTheme(next)} aria-label=${`colours: ${theme}; switch to ${next}`}>
      ${{ auto: "◐", light: "○", dark: "●" }[theme]}
    </button>`;
}

function KeyForm({ submitKey }) {
  const input = useRef(null);
  useEffect(() => input.current.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    if (input.current.value) submitKey(input.current.value);
  };
  return html`
    <form class="key card" onSubmit=${submit}>
      <label for="key">This server needs an API key. It stays in this tab.</label>
      <input id="key" ref=${input} type="password" autocomplete="off" spellcheck="false" />
      <button>Use it</button>
    </form>`;
}

render(html`<${App} />`, document.getElementById("app"));
