// The playground: continue a text or chat, streamed, with sampling controls and what the server reports.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { call, events } from "./net.js";
import { GapChart } from "./charts.js";
import { duration, size } from "./format.js";

const FIELDS = [
  { name: "max_tokens", label: "Max tokens", min: 1, max: 512, step: 1, value: 128 },
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, value: 0.8, hint: "0 is greedy" },
  { name: "top_p", label: "Top p", min: 0.05, max: 1, step: 0.05, value: 1 },
  { name: "top_k", label: "Top k", min: 0, max: 200, step: 1, value: 0, hint: "0 is off" },
  { name: "min_p", label: "Min p", min: 0, max: 0.5, step: 0.01, value: 0 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 1, max: 2, step: 0.05, value: 1 },
];
const START = {
  ...Object.fromEntries(FIELDS.map((field) => [field.name, field.value])),
  seed: "",
  stop: "",
  ignore_eos: false,
};

export function Playground({ plan, model, chat, own }) {
  const [mode, setMode] = useState("text");
  const [sampling, setSampling] = useState(START);
  const [run, setRun] = useState(null); // {phase: "waiting" | "writing" | "over", note, facts, refused}
  const [turns, setTurns] = useState([]); // of the chat: {role, content}
  const [draft, setDraft] = useState("");
  const paper = useRef(null);
  const gaps = useRef([]);
  const abort = useRef(null);
  const busy = run !== null && run.phase !== "over";

  const start = async () => {
    if (busy || !draft.trim()) return;
    abort.current = new AbortController();
    gaps.current = [];
    const ask = mode === "chat" ? chatRequest(model, [...turns, user(draft)], sampling) : textRequest(draft, sampling);
    const writer = paperWriter(paper.current);
    if (mode === "chat") {
      setTurns([...turns, user(draft)]);
      setDraft("");
    }
    const outcome = await stream(ask, writer, gaps.current, own, setRun, abort.current.signal);
    if (mode === "chat" && writer.text()) setTurns((all) => [...all, { role: "assistant", content: writer.text() }]);
    if (mode === "chat") writer.clear();
    setRun(outcome);
  };
  const stop = () => abort.current?.abort();
  useEffect(() => {
    const escape = (event) => event.key === "Escape" && stop();
    addEventListener("keydown", escape);
    return () => removeEventListener("keydown", escape);
  }, []);
  const change = (to) => {
    stop();
    setMode(to);
    setTurns([]);
    setRun(null);
    paperWriter(paper.current).clear();
  };
  return html`
    <section class="card playground" aria-label="Playground">
      <${Tabs} mode=${mode} chat=${chat} change=${change} />
      <${Sampling} sampling=${sampling} set=${setSampling} plan=${plan} />
      <div class="paper" tabindex="0" aria-label="Output">
        ${turns.map((turn) => html`<p class=${turn.role}>${turn.content}</p>`)}
        ${mode === "text" && run && html`<span class="prompt">${run.prompt}</span>`}
        <span ref=${paper} class=${`output ${busy ? "busy" : ""}`} aria-live="off"></span>
        ${!run && !turns.length && html`<p class="empty">${mode === "chat" ? "Say something." : "The model's text appears here, token by token."}</p>`}
      </div>
      <${Facts} run=${run} />
      <${GapChart} gaps=${gaps} busy=${busy} />
      <${Composer} mode=${mode} draft=${draft} setDraft=${setDraft} busy=${busy} start=${start} stop=${stop} />
    </section>`;
}

function Tabs({ mode, chat, change }) {
  const tab = (name, label) => html`
    <button role="tab" aria-selected=${mode === name} onClick=${() => mode !== name && change(name)}>${label}</button>`;
  return html`<div class="tabs" role="tablist">${tab("text", "Continue a text")}${chat && tab("chat", "Chat")}</div>`;
}

function Sampling({ sampling, set, plan }) {
  const give = (name, value) => set({ ...sampling, [name]: value });
  const most = plan ? plan.max_context - 1 : 512;
  return html`
    <details class="sampling">
      <summary>
        Sampling <span>${sampling.max_tokens} tokens · temperature ${sampling.temperature}${sampling.seed && ` · seed ${sampling.seed}`}</span>
      </summary>
      <div class="fields">
        ${FIELDS.map((field) => html`
          <label>
            <span>${field.label}${field.hint && html` <em>${field.hint}</em>`}</span>
            <input type="range" min=${field.min} max=${field.name === "max_tokens" ? most : field.max} step=${field.step}
              value=${sampling[field.name]} onInput=${(event) => give(field.name, Number(event.target.value))} />
            <output>${sampling[field.name]}</output>
          </label>`)}
        <label class="wide">
          <span>Seed <em>empty: random</em></span>
          <input inputmode="numeric" pattern="[0-9]*" value=${sampling.seed}
            onInput=${(event) => give("seed", event.target.value.replace(/\D/g, ""))} />
        </label>
        <label class="wide">
          <span>Stop sequences <em>one per line</em></span>
          <textarea rows="1" value=${sampling.stop} onInput=${(event) => give("stop", event.target.value)}></textarea>
        </label>
        <label class="check">
          <input type="checkbox" checked=${sampling.ignore_eos} onChange=${(event) => give("ignore_eos", event.target.checked)} />
          <span>Ignore the end-of-text token</span>
        </label>
      </div>
    </details>`;
}

function Facts({ run }) {
  if (!run) return html`<p class="facts" role="status"></p>`;
  if (run.refused) return html`<p class="facts refused" role="alert">${run.refused}</p>`;
  return html`
    <p class="facts" role="status">
      ${run.note && html`<b>${run.note}</b>`}
      ${(run.facts ?? []).map(([name, value]) => html`<span><em>${name}</em> ${value}</span>`)}
    </p>`;
}

function Composer({ mode, draft, setDraft, busy, start, stop }) {
  const box = useRef(null);
  useEffect(() => box.current.focus({ preventScroll: true }), [mode]);
  useEffect(() => {
    box.current.style.height = "auto";
    box.current.style.height = `${Math.min(box.current.scrollHeight + 2, 220)}px`;
  }, [draft]);
  const keys = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey || (mode === "chat" && !event.shiftKey))) {
      event.preventDefault();
      start();
    }
  };
  return html`
    <form class="composer" onSubmit=${(event) => { event.preventDefault(); busy ? stop() : start(); }}>
      <textarea ref=${box} rows="2" aria-label=${mode === "chat" ? "Message" : "Prompt"} value=${draft}
        placeholder=${mode === "chat" ? "A message" : "To be, or not to be"} maxlength="200000"
        onInput=${(event) => setDraft(event.target.value)} onKeyDown=${keys}></textarea>
      <button class=${busy ? "stop" : ""} disabled=${!busy && !draft.trim()}>
        ${busy ? "Stop" : "Write"}<kbd>${busy ? "Esc" : mode === "chat" ? "Enter" : "Ctrl Enter"}</kbd>
      </button>
    </form>`;
}

const user = (content) => ({ role: "user", content });

function knobs(sampling) {
  const { seed, stop, ...rest } = sampling;
  const stops = stop.split("\n").filter(Boolean);
  return { ...rest, ...(seed && { seed: Number(seed) }), ...(stops.length && { stop: stops }), stream: true };
}

function textRequest(prompt, sampling) {
  return { path: "generate", body: { prompt, ...knobs(sampling) }, prompt };
}

function chatRequest(model, messages, sampling) {
  const body = { model, messages, ...knobs(sampling), stream_options: { include_usage: true } };
  return { path: "v1/chat/completions", body, prompt: "" };
}

/** Runs one request to its end. Returns the final state to show. */
async function stream(ask, writer, gaps, own, setRun, signal) {
  const began = performance.now();
  const seen = { facts: [], tokens: 0, last: 0 };
  const show = (phase, note) => setRun({ phase, note, facts: seen.facts, prompt: ask.prompt });
  writer.clear();
  show("waiting", "sending");
  try {
    for await (const event of events(await call(ask.path, { body: ask.body, signal }))) {
      if (event.comment) show(seen.tokens ? "writing" : "waiting", waitingNote(event.comment));
      else if (event.data.error) throw new Error(event.data.error.message);
      else take(event.data, seen, { began, gaps, writer, own, show });
    }
    return { phase: "over", note: seen.reason ?? "done", facts: seen.facts, prompt: ask.prompt };
  } catch (error) {
    if (signal.aborted) return { phase: "over", note: "stopped by you", facts: seen.facts, prompt: ask.prompt };
    return { phase: "over", refused: error.message, prompt: ask.prompt };
  } finally {
    own.clear();
  }
}

/** One frame of either protocol. */
function take(frame, seen, { began, gaps, writer, own, show }) {
  if (frame.id && !own.size) own.add(frame.id);
  const text = frame.text ?? frame.choices?.[0]?.delta?.content ?? "";
  if (frame.type === "start") {
    seen.facts = [["slot", frame.slot], ["prompt", `${frame.prompt_tokens} tokens`]];
    if (frame.cached_tokens) seen.facts.push(["cached", `${frame.cached_tokens} tokens`]);
    seen.facts.push(["memory up to", size(frame.kv.max)]);
    show("waiting", "reading the prompt");
  }
  if (text) {
    const now = performance.now();
    const count = frame.token_ids?.length ?? 1;
    if (seen.last) gaps.push((now - seen.last) / count);
    else seen.facts.push(["first token", duration(now - began)]);
    if (!seen.tokens) show("writing", "");
    seen.last = now;
    seen.tokens += count;
    writer.add(text);
  }
  if (frame.type === "end") finish(frame, seen);
  const reason = frame.choices?.[0]?.finish_reason;
  if (reason) seen.reason = REASONS[reason] ?? reason;
  if (frame.usage && !frame.type) seen.facts.push(["tokens", frame.usage.completion_tokens]);
}

const REASONS = { stop: "finished", length: "max tokens reached", shutdown: "the server is shutting down" };

function finish(frame, seen) {
  const { usage, timing, seed } = frame;
  const seconds = (timing.total_ms - timing.ttft_ms) / 1000;
  seen.reason = REASONS[frame.finish_reason] ?? frame.finish_reason;
  seen.facts.push(["tokens", usage.completion_tokens]);
  if (usage.completion_tokens > 1) seen.facts.push(["speed", `${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`]);
  seen.facts.push(["seed", seed]);
}

/** ": waiting position=2 for=kv_bytes latest_ms=840" in words. */
function waitingNote(comment) {
  const fields = Object.fromEntries([...comment.matchAll(/(\w+)=(\S+)/g)].map((match) => [match[1], match[2]]));
  if (!comment.startsWith("waiting")) return "working";
  const what = { slot: "a slot", kv_bytes: "memory", prefill: "its turn" }[fields.for] ?? "its turn";
  const place = fields.position ? `, number ${fields.position} in the queue` : "";
  const latest = Number(fields.latest_ms) >= 0 ? `, at most ${(fields.latest_ms / 1000).toFixed(1)} s` : "";
  return `waiting for ${what}${place}${latest}`;
}

/** Appends text, at most once a frame, and keeps the end in view unless the user has scrolled away. */
function paperWriter(node) {
  const paper = node.parentElement;
  let pending = "";
  let drawn = 0;
  const draw = () => {
    drawn = 0;
    const follows = paper.scrollHeight - paper.scrollTop - paper.clientHeight < 40;
    const piece = document.createElement("span");
    piece.className = "fresh";
    piece.textContent = pending;
    pending = "";
    node.append(piece);
    if (node.childElementCount > 60) settle(node);
    if (follows) paper.scrollTop = paper.scrollHeight;
  };
  return {
    add(text) {
      pending += text;
      drawn ||= requestAnimationFrame(draw);
    },
    text: () => node.textContent + pending,
    clear() {
      cancelAnimationFrame(drawn);
      pending = "";
      node.replaceChildren();
    },
  };
}

/** Merges all but the last pieces into one text node: thousands of elements would be slow. */
function settle(node) {
  const old = [...node.childNodes].slice(0, -20);
  const text = document.createTextNode(old.map((piece) => piece.textContent).join(""));
  for (const piece of old) piece.remove();
  node.prepend(text);
}
