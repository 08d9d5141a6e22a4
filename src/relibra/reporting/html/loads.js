// Draws loads of ranks or experts, before and after, for the layer and the micro-batch that the sliders choose.
(() => {
  const root = document.getElementById("load-explorer");
  if (!root) return;
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("load-data").textContent);
  const KINDS = { Uint8Array, Uint16Array };
  const numbers = (array) => new KINDS[array.type](Uint8Array.from(atob(array.data), (c) => c.charCodeAt(0)).buffer);
  const unpack = (cube) => { // shares of the end of the scale, from 0 to 1; the largest number of the type means "beyond the end" and does not occur
    const share = (values) => Float64Array.from(values, (raw) => raw / (2 ** (8 * values.BYTES_PER_ELEMENT) - 2));
    return { ...cube, shares: share(numbers(cube)), busiest: share(numbers(cube.busiest)) };
  };
  for (const plan of data.plans) for (const rows of ["ranks", "experts"]) plan[rows] = unpack(plan[rows]);
  const [rows, layer, microBatch] = [byId("load-rows"), byId("load-layer"), byId("load-micro-batch")];
  const canvases = [...root.querySelectorAll("canvas[data-axis]")];
  const PROFILE = 34, LEFT = 30, BOTTOM = 18;
  const CIVIDIS = ["00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369", "e1cc55", "fee838"]
    .map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  const scaleOf = () => data.scales[rows.value]; // ranks and experts have one each: an expert may have many times a rank's share
  function paint(times) {
    const place = (Math.min(times, scaleOf().end) / scaleOf().end) * (CIVIDIS.length - 1);
    const low = Math.min(Math.floor(place), CIVIDIS.length - 2);
    return CIVIDIS[low].map((c, i) => Math.round(c + (CIVIDIS[low + 1][i] - c) * (place - low)));
  }
  let row = 0; // the cell that is read out: at first the busiest, its column is that of the slider

  const number = (input) => Number(input.value);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function cell(cube, m, l, r) { // load / mean; null where there is no such micro-batch
    if (m >= cube.shape[0]) return null;
    return cube.shares[(m * cube.shape[1] + l) * cube.shape[2] + r] ** cube.power * cube.end;
  }
  const words = (times, digits = 2) => (times === null ? "none" : `${times.toFixed(digits)}×`);

  function columns(canvas) { // columns of one picture: how many, the load of a cell, the names
    const plan = data.plans[Number(canvas.dataset.plan)], cube = plan[rows.value];
    const overLayers = canvas.dataset.axis === "l";
    return {
      cube,
      count: overLayers ? cube.shape[1] : cube.shape[0],
      chosen: number(overLayers ? layer : microBatch),
      at: overLayers ? (c, r) => cell(cube, number(microBatch), c, r) : (c, r) => cell(cube, c, number(layer), r),
      name: (c) => (overLayers ? data.layers[c] : plan.micro_batches[c]),
      what: overLayers ? "layer" : "micro-batch",
    };
  }

  function draw(canvas) {
    const { cube, count, chosen, at, name, what } = columns(canvas), size = cube.shape[2];
    const width = canvas.clientWidth, high = Math.max(2, Math.min(14, 300 / size)), height = Math.max(48, high * size);
    const scale = devicePixelRatio || 1;
    canvas.style.height = `${PROFILE + height + BOTTOM}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round((PROFILE + height + BOTTOM) * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const [text, soft, accent] = [colour("--text"), colour("--soft"), colour("--accent")];
    const inner = width - LEFT, wide = inner / count, step = height / size;
    const image = new ImageData(count, size), busiest = new Float64Array(count);
    for (let c = 0; c < count; c++) for (let r = 0; r < size; r++) {
      const value = at(c, r);
      if (value === null) continue;
      image.data.set([...paint(value), 255], 4 * (r * count + c));
      busiest[c] = Math.max(busiest[c], value);
    }
    const small = document.createElement("canvas");
    [small.width, small.height] = [count, size];
    small.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, LEFT, PROFILE, inner, height);
    context.strokeStyle = "#d55e00"; // hatched: loads beyond the scale
    context.lineWidth = 1;
    for (let c = 0; c < count; c++) for (let r = 0; r < size; r++) {
      if (!(at(c, r) > scaleOf().end)) continue;
      context.beginPath();
      context.moveTo(LEFT + c * wide, PROFILE + (r + 1) * step);
      context.lineTo(LEFT + (c + 1) * wide, PROFILE + r * step);
      context.stroke();
    }
    const level = (times) => (PROFILE - 4) * (1 - Math.min(times, scaleOf().end) / scaleOf().end);
    context.fillStyle = soft;
    for (let c = 0; c < count; c++) {
      const gap = wide > 4 ? 1 : 0;
      context.fillRect(LEFT + c * wide, level(busiest[c]), wide - gap, PROFILE - 4 - level(busiest[c]));
    }
    const mean = level(1);
    context.strokeStyle = text;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(LEFT, mean);
    context.lineTo(width, mean);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = soft;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText("max", LEFT - 5, PROFILE / 2);
    for (const r of size * step < 40 ? [0] : [0, size - 1]) {
      context.fillText(String(r), LEFT - 5, Math.min(PROFILE + height - 6, Math.max(PROFILE + 6, PROFILE + (r + 0.5) * step)));
    }
    context.textBaseline = "bottom";
    context.textAlign = "left";
    context.fillText(`${what} ${name(0)}`, LEFT, PROFILE + height + BOTTOM - 1);
    if (count > 1) {
      context.textAlign = "right";
      context.fillText(String(name(count - 1)), width, PROFILE + height + BOTTOM - 1);
    }
    if (chosen < count) {
      const frames = [[LEFT + chosen * wide, 1.5, wide, PROFILE + height - 3], [LEFT + chosen * wide, PROFILE + row * step, wide, step]];
      for (const [pen, thick] of wide < 8 ? [["#ffffff", 2], [accent, 1]] : [["#ffffff", 4], [accent, 2]]) { // two tones, visible on dark and on light cells
        context.strokeStyle = pen;
        context.lineWidth = thick;
        for (const frame of frames) context.strokeRect(...frame);
      }
    }
  }

  function drawScale() {
    const bar = byId("load-scale"), canvas = bar.querySelector("canvas"), context = canvas.getContext("2d");
    const { end, largest } = scaleOf();
    [canvas.width, canvas.height] = [256, 1];
    for (let x = 0; x < 256; x++) {
      context.fillStyle = `rgb(${paint((x / 255) * end)})`;
      context.fillRect(x, 0, 1, 1);
    }
    const middle = end >= 5 ? [Math.round(end / 2)] : end >= 2.5 ? [2] : [];
    const ticks = [...(end < 12 ? [0] : []), 1, ...middle, end]; // as many as fit
    bar.querySelector("div").replaceChildren(...ticks.map((tick, i) => {
      const label = document.createElement("span");
      label.textContent = i === ticks.length - 1 ? `${tick.toFixed(2)}× mean` : `${tick}×`;
      label.style.left = `${(100 * tick) / end}%`;
      return label;
    }));
    const what = rows.value === "ranks" ? "rank" : "instance of an expert";
    byId("load-beyond").textContent = `The largest load of one ${what} is ${words(largest)} the mean` +
      (largest > end ? `; what is beyond ${words(end)} is hatched.` : ".");
  }

  function readOut() {
    const kind = rows.value === "ranks" ? "rank" : "expert";
    const [l, m] = [number(layer), number(microBatch)];
    const largest = (cube) => (m >= cube.shape[0] ? null : cube.busiest[m * cube.shape[1] + l] * cube.end);
    const read = (cube) => { // loads of experts have a byte each, enough for one digit; the busiest has two
      if (m >= cube.shape[0]) return words(null);
      const others = Array.from({ length: cube.shape[2] }, (_, r) => cell(cube, m, l, r)), own = others[row];
      return own === Math.max(...others) ? words(largest(cube)) : words(own, kind === "rank" ? 2 : 1);
    };
    const [first, second] = data.plans.map((plan) => plan[rows.value]);
    const names = data.plans.map((plan) => (plan.micro_batches[m] === undefined ? "–" : plan.micro_batches[m]));
    byId("load-layer-value").textContent = data.layers[l];
    byId("load-micro-batch-value").textContent = names[0] === "–" ? names[1] : names[0];
    layer.setAttribute("aria-valuetext", `layer ${data.layers[l]}`);
    root.querySelector('[data-title="m"]').textContent = data.layers[l];
    root.querySelector('[data-title="l"]').textContent = byId("load-micro-batch-value").textContent;
    const node = kind === "rank" && data.ranks_per_node < first.shape[2] ? ` (node ${Math.floor(row / data.ranks_per_node)})` : "";
    byId("load-readout").textContent =
      `Layer ${data.layers[l]}, micro-batch ${byId("load-micro-batch-value").textContent}: busiest ${kind} ` +
      `${words(largest(first))} → ${words(largest(second))} the mean; ${kind} ${row}${node} ` +
      `${read(first)} → ${read(second)}.`;
  }

  function busiestRow() {
    const cube = data.plans[0][rows.value], m = Math.min(number(microBatch), cube.shape[0] - 1);
    const values = Array.from({ length: cube.shape[2] }, (_, r) => cell(cube, m, number(layer), r));
    return values.indexOf(Math.max(...values));
  }

  function show() {
    row = Math.min(row, data.plans[0][rows.value].shape[2] - 1);
    for (const canvas of canvases) draw(canvas);
    readOut();
  }

  const move = (input, by) => { input.value = number(input) + by; };
  for (const canvas of canvases) {
    const along = canvas.dataset.axis === "l" ? layer : microBatch;
    canvas.addEventListener("keydown", (event) => {
      const size = data.plans[0][rows.value].shape[2];
      if (event.key === "ArrowLeft") move(along, -1);
      else if (event.key === "ArrowRight") move(along, 1);
      else if (event.key === "ArrowUp") row = Math.max(0, row - 1);
      else if (event.key === "ArrowDown") row = Math.min(size - 1, row + 1);
      else return;
      event.preventDefault();
      show();
    });
    canvas.addEventListener("click", (event) => {
      const { count, cube } = columns(canvas), box = canvas.getBoundingClientRect(), size = cube.shape[2];
      const inside = (value, most) => Math.max(0, Math.min(most - 1, Math.floor(value)));
      along.value = inside(((event.clientX - box.left - LEFT) / (box.width - LEFT)) * count, count);
      row = inside(((event.clientY - box.top - PROFILE) / (box.height - PROFILE - BOTTOM)) * size, size);
      show();
    });
  }
  rows.value = "ranks"; // browsers keep a choice over a reload
  [layer.value, microBatch.value] = data.first;
  for (const input of [rows, layer, microBatch]) input.addEventListener("input", show);
  new ResizeObserver(show).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  rows.addEventListener("input", () => { row = busiestRow(); drawScale(); show(); });
  row = busiestRow();
  drawScale();
  show();
})();
