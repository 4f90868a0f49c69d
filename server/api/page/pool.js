// The pool, live: memory, slots, future demand, throughput and the queue.

import { html, useEffect, useRef } from "./vendor/preact-htm.js";
import { axis, Chart, colour } from "./charts.js";
import { useSnapshot } from "./feed.js";
import { seconds, size } from "./format.js";
import { Slots } from "./slots.js";
import { Title } from "./title.js";

export function Pool({ plan, feed, own }) {
  return html`
    <section class="pool" aria-label="The pool, live">
      <${Memory} feed=${feed} />
      <${Slots} feed=${feed} own=${own} plan=${plan} />
      <${Demand} feed=${feed} />
      <${Throughput} feed=${feed} />
      <${Queue} feed=${feed} />
    </section>`;
}

function Memory({ feed }) {
  const snapshot = useSnapshot(feed);
  const bar = useRef(null);
  useEffect(() => {
    if (!snapshot) return;
    const { budget, held, kept, owed } = snapshot.pool;
    const [used, cached, reserved] = bar.current.children;
    used.style.width = `${(100 * held) / budget}%`;
    cached.style.width = `${(100 * kept) / budget}%`;
    reserved.style.left = used.style.width;
    reserved.style.width = `${(100 * owed) / budget}%`;
  });
  if (!snapshot) return html`<div class="card memory"><${Title} text="K/V memory" /></div>`;
  const { budget, held, kept, owed } = snapshot.pool;
  const share = (bytes) => `${Math.round((100 * bytes) / budget)} %`;
  return html`
    <div class="card memory">
      <${Title} text="K/V memory"><b>${size(held)}</b> of ${size(budget)} in use<//>
      <div class="bar" ref=${bar} role="img" aria-label=${`${share(held)} in use, ${share(owed)} reserved, ${share(kept)} prefix cache`}>
        <i class="held"></i><i class="kept"></i><i class="owed"></i>
      </div>
      <ul class="legend">
        <li class="held">in use <b>${size(held)}</b></li>
        <li class="owed" title="what running requests may need on top, at their peak">reserved <b>${size(owed)}</b></li>
        <li class="kept">prefix cache <b>${size(kept)}</b></li>
        <li title="in use and prefix cache, as the kernel counts it; read once a second">measured by the kernel <b>${size(snapshot.kernel)}</b></li>
      </ul>
    </div>`;
}

const POWERS = Array.from({ length: 50 }, (_, power) => 2 ** power);
const LINE = { points: { show: false } };

/** The memory that running requests, and waiting ones on top, may need from now on; against the pool's size. */
function Demand({ feed }) {
  const show = (draw) => feed((snapshot) => {
    const { seconds, running, all } = snapshot.demand;
    const last = Math.max(running.length, all.length);
    const time = Array.from({ length: last + 1 }, (_, at) => (seconds * at) / Math.max(1, last));
    const padded = (values) => [...values, ...Array(last + 1 - values.length).fill(0)];
    draw([time, padded(all), padded(running), time.map(() => snapshot.pool.budget)]);
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
      { ...LINE, stroke: colour("quiet"), width: 1, dash: [4, 4] },
      { ...LINE, stroke: colour("accent"), width: 1.5, fill: colour("accent-faint") },
      { ...LINE, stroke: colour("danger"), width: 1.25 },
    ],
  });
  return html`
    <div class="card demand">
      <${Title} text="Memory needed from now on" />
      <ul class="legend">
        <li class="held">running</li>
        <li class="dashed">running and waiting</li>
        <li class="limit">pool size</li>
      </ul>
      <${Chart} label="Memory that requests may need from now on, against the pool's size" options=${options} height=${150} feed=${show} />
    </div>`;
}

/** Tokens per second of all streams, and the gaps between tokens, over the last minute. */
function Throughput({ feed }) {
  const SHOWN = 60;
  const latest = useSnapshot(feed, 1000);
  const show = (draw) => {
    const past = [];
    return feed((snapshot) => {
      past.push([snapshot.t, snapshot.pace.tokens_per_s, snapshot.pace.gap_p99_ms]);
      while (past[0][0] < snapshot.t - SHOWN) past.shift();
      draw([past.map((one) => one[0] - snapshot.t), past.map((one) => one[1]), past.map((one) => one[2])]);
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
      { ...LINE, stroke: colour("accent"), width: 1.5, fill: colour("accent-faint") },
      { ...LINE, scale: "ms", stroke: colour("kept-line"), width: 1.25, spanGaps: true },
    ],
  });
  return html`
    <div class="card pace">
      <${Title} text="Throughput">${latest && html`<b>${Math.round(latest.pace.tokens_per_s)}</b> tokens/s`}<//>
      <ul class="legend">
        <li class="held">tokens per second, all streams</li>
        <li class="kept">gap between tokens, p99</li>
      </ul>
      <${Chart} label="Tokens per second and the gap between tokens over the last minute" options=${options} height=${130} feed=${show} />
    </div>`;
}

const WAITS_FOR = { slot: "a slot", kv_bytes: "memory" };

function Queue({ feed }) {
  const snapshot = useSnapshot(feed);
  const waiting = snapshot?.waiting ?? [];
  const count = waiting.length + (snapshot?.more_waiting ?? 0);
  return html`
    <div class="card queue">
      <${Title} text="Queue"><b>${count}</b> waiting<//>
      ${waiting.length > 0 && html`
        <table>
          <thead><tr><th>request</th><th>needs</th><th>waits for</th><th>waited</th><th>starts within</th></tr></thead>
          <tbody>
            ${waiting.slice(0, 8).map((one) => html`
              <tr key=${one.id + one.index}>
                <td>${one.id.slice(0, 12)}</td>
                <td>${size(one.bytes)}</td>
                <td>${WAITS_FOR[one.for] ?? one.for}</td>
                <td>${seconds(one.waited_s)}</td>
                <td>${one.latest_s === null ? "–" : seconds(one.latest_s)}</td>
              </tr>`)}
          </tbody>
        </table>`}
      ${count > 8 && html`<p class="quiet hint">and ${count - 8} more</p>`}
    </div>`;
}
