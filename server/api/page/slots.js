// Every slot as a cell that fills from below with the rows its sequence has, under the rows it may still need.

import { html, useEffect, useRef } from "./vendor/preact-htm.js";
import { colour } from "./charts.js";
import { useSnapshot } from "./feed.js";
import { size } from "./format.js";
import { Title } from "./title.js";

export function Slots({ feed, own, plan }) {
  const canvas = useRef(null);
  const hint = useRef(null);
  const summary = useSnapshot(feed, 500);
  useEffect(() => {
    const grid = slotGrid(canvas.current, hint.current, own, plan?.bytes_per_token ?? 0);
    const leave = feed(grid.show);
    return () => {
      leave();
      grid.close();
    };
  }, [plan]);
  const words = summary && `${summary.running.length} of ${summary.slots} slots running, ${summary.resident.length} cached`;
  return html`
    <div class="card slots">
      <${Title} text="Slots">${summary && html`<b>${summary.running.length}</b> of ${summary.slots} running`}<//>
      <canvas ref=${canvas} tabindex="0" role="img" aria-label=${words ?? "Slots"}></canvas>
      <p class="quiet hint" ref=${hint} role="status">Point at a slot, or use the arrow keys.</p>
    </div>`;
}

/** Draws the grid and describes the selected slot in `hint`. Cells move towards their true levels. */
function slotGrid(canvas, hint, own, bytesPerToken) {
  const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
  const drawn = new Map(); // slot -> [rows, most rows] as drawn
  let snapshot = null;
  let selected = -1;
  let frame = 0;
  let scale = 16; // rows that fill a cell
  let cells = null;

  const draw = () => {
    frame = 0;
    if (!snapshot) return;
    cells = layout(canvas, snapshot.slots);
    const levels = slotLevels(snapshot);
    const fullScale = 2 ** Math.ceil(Math.log2(Math.max(16, ...[...levels.values()].map((level) => level.most))));
    const ease = reducedMotion.matches ? 1 : 0.3;
    scale += (fullScale - scale) * ease;
    let moving = Math.abs(fullScale - scale) > 0.5;
    const pen = cleared(canvas);
    for (let slot = 0; slot < snapshot.slots; slot++) {
      const { rows, most, kind, id } = levels.get(slot) ?? { rows: 0, most: 0, kind: "free" };
      const now = drawn.get(slot) ?? [0, 0];
      now[0] += (rows - now[0]) * ease;
      now[1] += (most - now[1]) * ease;
      moving ||= Math.abs(rows - now[0]) + Math.abs(most - now[1]) > 0.5;
      drawn.set(slot, now);
      drawCell(pen, cells, cells.at(slot), now[0] / scale, now[1] / scale, kind);
      if (own.has(id) || slot === selected) drawBorder(pen, cells, cells.at(slot), own.has(id));
    }
    pen.restore();
    if (moving) redraw();
  };
  const redraw = () => (frame ||= requestAnimationFrame(draw));
  const update = () => {
    if (snapshot && selected >= 0 && selected < snapshot.slots) hint.textContent = describe(snapshot, selected, bytesPerToken);
    redraw();
  };
  const select = (slot) => {
    selected = snapshot ? Math.max(0, Math.min(snapshot.slots - 1, slot)) : -1;
    update();
  };
  const onPointer = (event) => {
    const box = canvas.getBoundingClientRect();
    const slot = cells?.find(event.clientX - box.left, event.clientY - box.top);
    if (slot >= 0) select(slot);
  };
  const onKey = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -cells?.columns, ArrowDown: cells?.columns }[event.key];
    if (by) {
      event.preventDefault();
      select(selected + by);
    }
  };
  canvas.addEventListener("pointermove", onPointer);
  canvas.addEventListener("pointerdown", onPointer);
  canvas.addEventListener("keydown", onKey);
  addEventListener("themechange", redraw);
  const resized = new ResizeObserver(redraw);
  resized.observe(canvas);
  return {
    show(next) {
      snapshot = next;
      if (!document.hidden) update();
    },
    close() {
      resized.disconnect();
      removeEventListener("themechange", redraw);
      cancelAnimationFrame(frame);
    },
  };
}

function slotLevels(snapshot) {
  const levels = new Map();
  for (const [slot, rows] of snapshot.resident) levels.set(slot, { rows, most: rows, kind: "cached" });
  for (const [slot, rows, most, id, , paused] of snapshot.running) {
    levels.set(slot, { rows, most, kind: paused ? "paused" : "running", id });
  }
  return levels;
}

/** A grid over the full width, at most 260 px high; cells a little taller than wide, in full rows if possible. */
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
    columns: best.columns,
    width: best.w - gap,
    height: best.h - gap,
    at: (slot) => [(slot % best.columns) * best.w + 2, Math.floor(slot / best.columns) * (best.h + 2) + 2],
    find(x, y) {
      const column = Math.floor(x / best.w);
      const slot = Math.floor(y / (best.h + 2)) * best.columns + column;
      return column >= 0 && column < best.columns && slot >= 0 && slot < count ? slot : -1;
    },
  };
}

function cleared(canvas) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.save();
  pen.scale(ratio, ratio);
  pen.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  pen.colours = Object.fromEntries(["held", "owed", "kept", "sunken", "ink", "own"].map((name) => [name, colour(name)]));
  return pen;
}

/** `rows` and `most`: shares of the cell's height. */
function drawCell(pen, { width, height }, [x, y], rows, most, kind) {
  const { colours } = pen;
  pen.save();
  pen.beginPath();
  pen.roundRect(x, y, width, height, Math.min(5, width / 4));
  pen.fillStyle = colours.sunken;
  pen.fill();
  pen.clip();
  const fill = (share, style) => {
    pen.fillStyle = style;
    pen.fillRect(x, y + height * (1 - share), width, height * share);
  };
  if (most > 0) fill(Math.min(1, most), kind === "cached" ? colours.kept : colours.owed);
  if (kind !== "cached" && rows > 0) fill(Math.min(1, rows), kind === "free" ? colours.owed : colours.held);
  if (kind === "paused") {
    pen.fillStyle = colours.sunken;
    for (let line = 3; line < height; line += 6) pen.fillRect(x, y + line, width, 2);
  }
  pen.restore();
}

function drawBorder(pen, { width, height }, [x, y], own) {
  pen.beginPath();
  pen.roundRect(x - 1, y - 1, width + 2, height + 2, Math.min(5, width / 4) + 1);
  pen.strokeStyle = own ? pen.colours.own : pen.colours.ink;
  pen.lineWidth = 2;
  pen.stroke();
}

function describe(snapshot, slot, bytesPerToken) {
  const running = snapshot.running.find((entry) => entry[0] === slot);
  if (running) {
    const [, rows, most, id, index, paused] = running;
    const choice = index ? ` (choice ${index})` : "";
    const pause = paused ? ", paused for a slow reader" : "";
    return `slot ${slot}: ${id}${choice}, ${rows} rows (${size(rows * bytesPerToken)}), up to ${most - rows} more${pause}`;
  }
  const cached = snapshot.resident.find((entry) => entry[0] === slot);
  return cached ? `slot ${slot}: ${cached[1]} rows of a cached prefix` : `slot ${slot}: free`;
}
