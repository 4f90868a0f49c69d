// The live picture of the pool: who holds how much, what is still to come, who waits for what.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { call, events } from "./net.js";
import { axis, Chart, colour } from "./charts.js";
import { size } from "./playground.js";

/** The stream of pictures, kept alive. `feed` takes a listener and gives back how to leave. */
export function useFeed(again) {
  const listeners = useRef(new Set());
  const latest = useRef(null);
  const [state, setState] = useState("connecting");
  useEffect(() => {
    const stop = new AbortController();
    follow(stop.signal, (picture) => {
      latest.current = picture;
      for (const listener of listeners.current) listener(picture);
    }, setState);
    return () => stop.abort();
  }, [again]);
  const feed = (listener) => {
    listeners.current.add(listener);
    if (latest.current) listener(latest.current);
    return () => listeners.current.delete(listener);
  };
  return { feed, state };
}

async function follow(signal, tell, setState) {
  for (let wait = 500; !signal.aborted; wait = Math.min(wait * 2, 8000)) {
    try {
      for await (const event of events(await call("pool", { signal }))) {
        if (!event.data) continue;
        wait = 500;
        setState(event.data.state);
        tell(event.data);
      }
    } catch (error) {
      if (signal.aborted || error.status === 401) return;
    }
    if (!signal.aborted) setState("lost");
    await new Promise((resume) => setTimeout(resume, wait));
  }
}

export function Pool({ plan, feed, own }) {
  return html`
    <section class="pool" aria-label="The pool, live">
      <${Memory} feed=${feed} />
      <${Slots} feed=${feed} own=${own} plan=${plan} />
      <${Demand} feed=${feed} />
      <${Pace} feed=${feed} />
      <${Queue} feed=${feed} />
    </section>`;
}

function Title({ text, children }) {
  return html`<div class="title"><h2>${text}</h2><p class="figure">${children}</p></div>`;
}

function usePicture(feed) {
  const [picture, setPicture] = useState(null);
  useEffect(() => feed(setPicture), []);
  return picture;
}

function Memory({ feed }) {
  const picture = usePicture(feed);
  const bar = useRef(null);
  useEffect(() => {
    if (!picture) return;
    const { budget, held, kept, owed } = picture.pool;
    const [now, rest, peak] = bar.current.children;
    now.style.width = `${(100 * held) / budget}%`;
    rest.style.width = `${(100 * kept) / budget}%`;
    peak.style.left = now.style.width;
    peak.style.width = `${(100 * owed) / budget}%`;
  });
  if (!picture) return html`<div class="card memory"><${Title} text="Memory for K and V" /></div>`;
  const { budget, held, kept, owed } = picture.pool;
  const share = (bytes) => `${Math.round((100 * bytes) / budget)} %`;
  return html`
    <div class="card memory">
      <${Title} text="Memory for K and V"><b>${size(held)}</b> held of ${size(budget)}<//>
      <div class="bar" ref=${bar} role="img" aria-label=${`${share(held)} held, ${share(owed)} still owed, ${share(kept)} kept for reuse`}>
        <i class="held"></i><i class="kept"></i><i class="owed"></i>
      </div>
      <ul class="legend">
        <li class="held">held <b>${size(held)}</b></li>
        <li class="owed">still owed at the peak <b>${size(owed)}</b></li>
        <li class="kept">kept for reuse <b>${size(kept)}</b></li>
        <li title="held and kept, counted by the kernel; read once a second">the kernel's figure <b>${size(picture.kernel)}</b></li>
      </ul>
    </div>`;
}

function Slots({ feed, own, plan }) {
  const canvas = useRef(null);
  const told = useRef(null);
  const summary = usePictureEvery(feed, 500);
  useEffect(() => {
    const grid = slotGrid(canvas.current, told.current, own, () => bytesOf(plan));
    const leave = feed(grid.show);
    return () => {
      leave();
      grid.close();
    };
  }, [plan]);
  const words = summary && `${summary.running.length} of ${summary.slots} slots run, ${summary.resident.length} are kept for reuse`;
  return html`
    <div class="card slots">
      <${Title} text="Slots">${summary && html`<b>${summary.running.length}</b> of ${summary.slots} run`}<//>
      <canvas ref=${canvas} tabindex="0" role="img" aria-label=${words ?? "the slots"}></canvas>
      <p class="quiet hint" ref=${told} role="status">Point at a slot, or step through with the arrow keys.</p>
    </div>`;
}

const bytesOf = (plan) => plan?.bytes_per_token ?? 0;

function usePictureEvery(feed, milliseconds) {
  const [picture, setPicture] = useState(null);
  useEffect(() => {
    let last = 0;
    return feed((next) => {
      if (performance.now() - last < milliseconds) return;
      last = performance.now();
      setPicture(next);
    });
  }, []);
  return picture;
}

/** Draws every slot as a vessel: rows held from the bottom up, above them the rows it may still come to need. */
function slotGrid(canvas, told, own, bytesPerToken) {
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const shown = new Map(); // slot -> [rows, rows_max] as drawn; they run after the true ones
  let picture = null;
  let chosen = -1;
  let frame = 0;
  let scale = 16;
  let cells = null;

  const draw = () => {
    frame = 0;
    if (!picture) return;
    cells = layout(canvas, picture.slots);
    const targets = new Map();
    for (const [slot, rows] of picture.resident) targets.set(slot, [rows, rows, "kept"]);
    for (const [slot, rows, most, id, , held] of picture.running) targets.set(slot, [rows, most, held ? "paused" : "held", id]);
    const wanted = 2 ** Math.ceil(Math.log2(Math.max(16, ...[...targets.values()].map((target) => target[1]))));
    const ease = still.matches ? 1 : 0.3;
    scale += (wanted - scale) * ease;
    const pen = begin(canvas);
    let moving = Math.abs(wanted - scale) > 0.5;
    for (let slot = 0; slot < picture.slots; slot++) {
      const [rows, most, kind, id] = targets.get(slot) ?? [0, 0, "free"];
      const now = shown.get(slot) ?? [0, 0];
      now[0] += (rows - now[0]) * ease;
      now[1] += (most - now[1]) * ease;
      moving ||= Math.abs(rows - now[0]) + Math.abs(most - now[1]) > 0.5;
      shown.set(slot, now);
      vessel(pen, cells.at(slot), cells, now[0] / scale, now[1] / scale, kind, own.has(id), slot === chosen);
    }
    pen.restore();
    if (moving) frame ||= requestAnimationFrame(draw);
  };
  const redraw = () => (frame ||= requestAnimationFrame(draw));
  const tell = () => {
    if (picture && chosen >= 0 && chosen < picture.slots) told.textContent = describe(picture, chosen, bytesPerToken());
    redraw();
  };
  const choose = (slot) => {
    chosen = picture ? Math.max(0, Math.min(picture.slots - 1, slot)) : -1;
    tell();
  };
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    const slot = cells?.find(event.clientX - box.left, event.clientY - box.top);
    if (slot >= 0) choose(slot);
  };
  const step = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -cells?.columns, ArrowDown: cells?.columns }[event.key];
    if (by) {
      event.preventDefault();
      choose(chosen + by);
    }
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("keydown", step);
  addEventListener("themechange", redraw);
  const fit = new ResizeObserver(redraw);
  fit.observe(canvas);
  return {
    show(next) {
      picture = next;
      if (!document.hidden) tell();
    },
    close() {
      fit.disconnect();
      removeEventListener("themechange", redraw);
      cancelAnimationFrame(frame);
    },
  };
}

/** The grid that fills the width with vessels a little taller than wide, at most 260 px high; full rows if it can. */
function layout(canvas, count) {
  const width = canvas.clientWidth - 2;
  const best = { columns: count };
  for (let columns = 1; columns <= count; columns++) {
    const w = width / columns;
    const rows = Math.ceil(count / columns);
    const h = Math.min(w * 1.5, 64);
    const full = count % columns === 0;
    if (rows * h <= 260 && w >= 3 && (full || !best.full || w > 46)) {
      Object.assign(best, { columns, rows, w, h, full });
      if ((w <= 46 && full) || w <= 24) break;
    }
  }
  best.w ??= width / best.columns;
  best.h ??= 32;
  best.rows ??= 1;
  const gap = Math.min(6, best.w * 0.18);
  const height = best.rows * best.h + (best.rows - 1) * 2 + 2;
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  return {
    ...best,
    gap,
    at: (slot) => [(slot % best.columns) * best.w + 2, Math.floor(slot / best.columns) * (best.h + 2) + 2],
    find(x, y) {
      const column = Math.floor(x / best.w);
      const slot = Math.floor(y / (best.h + 2)) * best.columns + column;
      return column >= 0 && column < best.columns && slot >= 0 && slot < count ? slot : -1;
    },
  };
}

function begin(canvas) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.save();
  pen.scale(ratio, ratio);
  pen.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  pen.colours = Object.fromEntries(["held", "owed", "kept", "line", "sunken", "ink", "own"].map((name) => [name, colour(name)]));
  return pen;
}

function vessel(pen, [x, y], { w, h, gap }, rows, most, kind, mine, chosen) {
  const { colours } = pen;
  const [width, height] = [w - gap, h - gap];
  const radius = Math.min(5, width / 4);
  pen.save();
  pen.beginPath();
  pen.roundRect(x, y, width, height, radius);
  pen.fillStyle = colours.sunken;
  pen.fill();
  pen.clip();
  const fill = (share, style) => {
    pen.fillStyle = style;
    pen.fillRect(x, y + height * (1 - share), width, height * share);
  };
  if (most > 0) fill(Math.min(1, most), kind === "kept" ? colours.kept : colours.owed);
  if (kind !== "kept" && rows > 0) fill(Math.min(1, rows), kind === "free" ? colours.owed : colours.held);
  if (kind === "paused") {
    pen.fillStyle = colours.sunken;
    for (let line = 3; line < height; line += 6) pen.fillRect(x, y + line, width, 2);
  }
  pen.restore();
  if (mine || chosen) {
    pen.beginPath();
    pen.roundRect(x - 1, y - 1, width + 2, height + 2, radius + 1);
    pen.strokeStyle = mine ? colours.own : colours.ink;
    pen.lineWidth = 2;
    pen.stroke();
  }
}

function describe(picture, slot, bytesPerToken) {
  const running = picture.running.find((entry) => entry[0] === slot);
  if (running) {
    const [, rows, most, id, index, held] = running;
    const owed = most - rows;
    const choice = index ? ` (choice ${index})` : "";
    return `slot ${slot}: ${id}${choice}, ${rows} rows held (${size(rows * bytesPerToken)}), at most ${owed} more${held ? ", paused for its reader" : ""}`;
  }
  const kept = picture.resident.find((entry) => entry[0] === slot);
  return kept ? `slot ${slot}: ${kept[1]} rows kept for a prompt that begins the same` : `slot ${slot}: free`;
}

const POWERS = Array.from({ length: 50 }, (_, power) => 2 ** power);

/** D(t): what those that run, and with them those that wait, can come to need at each coming moment, under the pool. */
function Demand({ feed }) {
  const show = (draw) => feed((picture) => {
    const { seconds, running, all } = picture.demand;
    const last = Math.max(running.length, all.length);
    const time = Array.from({ length: last + 1 }, (_, at) => (seconds * at) / Math.max(1, last));
    const line = (values) => [...values, ...Array(last + 1 - values.length).fill(0)];
    draw([time, line(all), line(running), time.map(() => picture.pool.budget)]);
  });
  const options = () => ({
    empty: [[0], [0], [0], [0]],
    cursor: { show: false },
    legend: { show: false },
    padding: [10, 10, 0, 0],
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, (high || 1) * 1.08] } },
    axes: [
      axis({ size: 24, space: 70, values: (_, ticks) => ticks.map((tick) => `${tick} s`) }),
      axis({ size: 62, space: 28, incrs: POWERS, values: (_, ticks) => ticks.map((tick) => size(tick)) }),
    ],
    series: [
      {},
      { stroke: colour("quiet"), width: 1, dash: [4, 4], points: { show: false } },
      { stroke: colour("accent"), width: 1.5, fill: colour("accent-faint"), points: { show: false } },
      { stroke: colour("danger"), width: 1.25, points: { show: false } },
    ],
  });
  return html`
    <div class="card demand">
      <${Title} text="What is still to come" />
      <ul class="legend">
        <li class="held">those that run</li>
        <li class="dashed">with those that wait</li>
        <li class="limit">the pool</li>
      </ul>
      <${Chart} label="Bytes that can come to be needed from now on, against the pool" options=${options} height=${150} feed=${show} />
    </div>`;
}

function Queue({ feed }) {
  const picture = usePicture(feed);
  const waiting = picture?.waiting ?? [];
  const count = waiting.length + (picture?.more_waiting ?? 0);
  return html`
    <div class="card queue">
      <${Title} text="Queue"><b>${count}</b> ${count === 1 ? "waits" : "wait"}<//>
      ${waiting.length > 0 && html`
        <table>
          <thead><tr><th>request</th><th>needs</th><th>for</th><th>waits</th><th>slot within</th></tr></thead>
          <tbody>
            ${waiting.slice(0, 8).map((one) => html`
              <tr key=${one.id + one.index}>
                <td>${one.id.slice(0, 12)}</td>
                <td>${size(one.bytes)}</td>
                <td>${{ slot: "a slot", kv_bytes: "memory" }[one.for] ?? one.for}</td>
                <td>${seconds(one.waited_s)}</td>
                <td>${one.latest_s === null ? "–" : seconds(one.latest_s)}</td>
              </tr>`)}
          </tbody>
        </table>`}
      ${count > 8 && html`<p class="quiet hint">and ${count - 8} more</p>`}
    </div>`;
}

const seconds = (value) => (value < 10 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`);

/** Tokens a second of everyone, and the gaps between tokens, over the last minute. */
function Pace({ feed }) {
  const SHOWN = 60;
  const latest = usePictureEvery(feed, 1000);
  const show = (draw) => {
    const past = [];
    return feed((picture) => {
      past.push([picture.t, picture.pace.tokens_per_s, picture.pace.gap_p99_ms]);
      while (past[0][0] < picture.t - SHOWN) past.shift();
      draw([past.map((one) => one[0] - picture.t), past.map((one) => one[1]), past.map((one) => one[2])]);
    });
  };
  const options = () => ({
    empty: [[0], [0], [0]],
    cursor: { show: false },
    legend: { show: false },
    padding: [10, 0, 0, 0],
    scales: {
      x: { time: false, range: () => [-SHOWN, 0] },
      y: { range: (_, low, high) => [0, Math.max(high || 0, 10) * 1.15] },
      ms: { range: (_, low, high) => [0, Math.max(high || 0, 1) * 1.15] },
    },
    axes: [
      axis({ size: 24, space: 40, incrs: [20, 60], values: (_, ticks) => ticks.map((tick) => (tick ? `${tick} s` : "now")) }),
      axis({ size: 46, space: 28 }),
      axis({ scale: "ms", side: 1, size: 56, space: 28, grid: { show: false }, values: (_, ticks) => ticks.map((tick) => `${tick} ms`) }),
    ],
    series: [
      {},
      { stroke: colour("accent"), width: 1.5, fill: colour("accent-faint"), points: { show: false } },
      { scale: "ms", stroke: colour("kept-line"), width: 1.25, spanGaps: true, points: { show: false } },
    ],
  });
  return html`
    <div class="card pace">
      <${Title} text="Pace">${latest && html`<b>${Math.round(latest.pace.tokens_per_s)}</b> tokens/s`}<//>
      <ul class="legend">
        <li class="held">tokens a second, all streams</li>
        <li class="kept">longest gaps (p99)</li>
      </ul>
      <${Chart} label="Tokens a second and the longest gaps over the last minute" options=${options} height=${130} feed=${show} />
    </div>`;
}
