// Charts, by uPlot, in the theme's colours.

import { html, useEffect, useRef } from "./vendor/preact-htm.js";

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A chart as wide as its box. Recreated with `options()` when the theme changes. */
export function Chart({ label, options, height, feed }) {
  const box = useRef(null);
  useEffect(() => {
    let chart = null;
    let last = null;
    const make = () => {
      chart?.destroy();
      chart = new uPlot({ ...options(), width: box.current.clientWidth, height }, last ?? options().empty, box.current);
    };
    const show = (data) => {
      last = data;
      if (!document.hidden) chart.setData(data);
    };
    const fit = new ResizeObserver(() => {
      if (chart && box.current.clientWidth) chart.setSize({ width: box.current.clientWidth, height });
    });
    make();
    fit.observe(box.current);
    addEventListener("themechange", make);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", make);
    const leave = feed(show);
    return () => {
      leave();
      fit.disconnect();
      removeEventListener("themechange", make);
      scheme.removeEventListener("change", make);
      chart.destroy();
    };
  }, []);
  return html`<div class="chart" ref=${box} role="img" aria-label=${label}></div>`;
}

/** A plain axis: few ticks, faint lines. */
export function axis(more = {}) {
  return {
    stroke: colour("quiet"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: colour("line"), width: 1 },
    ticks: { show: false },
    ...more,
  };
}

/** The gap before each token of the playground's stream. */
export function GapChart({ gaps, busy }) {
  const SHOWN = 240;
  const feed = (show) => {
    let drawn = -1;
    const timer = setInterval(() => {
      const all = gaps.current;
      if (all.length === drawn) return;
      drawn = all.length;
      const first = Math.max(0, all.length - SHOWN);
      show([Array.from({ length: all.length - first }, (_, at) => first + at + 2), all.slice(first)]);
    }, 120);
    return () => clearInterval(timer);
  };
  const options = () => ({
    empty: [[], []],
    cursor: { show: false },
    legend: { show: false },
    padding: [8, 8, 0, 0],
    scales: {
      x: { time: false, range: (_, low, high) => [low ?? 2, Math.max(high ?? 0, (low ?? 2) + 30)] },
      y: { range: (_, low, high) => [0, Math.max(high || 0, 1) * 1.15] },
    },
    axes: [
      axis({ size: 22, space: 60, incrs: [10, 20, 50, 100] }),
      axis({ size: 46, space: 24, values: (_, ticks) => ticks.map((tick) => `${tick} ms`) }),
    ],
    series: [{}, { stroke: colour("accent"), width: 1.5, fill: colour("accent-faint"), points: { show: false } }],
  });
  return html`
    <figure class="gaps">
      <figcaption>Gap before each token</figcaption>
      <${Chart} label="The gap before each token, in milliseconds" options=${options} height=${92} feed=${feed} />
    </figure>`;
}
