// Draws loads of ranks or experts, before and after, for the layer and the micro-batch that the sliders choose.
(() => {
  const byId = (id) => document.getElementById(id), number = (input) => Number(input.value);
  const root = byId("load-explorer");
  if (!root) return;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const data = JSON.parse(byId("load-data").textContent);
  for (const plan of data.plans) for (const rows of ["ranks", "experts"]) {
    const [micro_batches, layers, size] = plan[rows].shape, { largest } = plan[rows];
    const raw = new Uint16Array(Uint8Array.from(atob(plan[rows].data), (c) => c.charCodeAt(0)).buffer);
    plan[rows] = { // loads / mean of a micro-batch and layer; null where there is no such micro-batch
      micro_batches, layers, size,
      cell: (m, l, r) => (m < micro_batches ? (raw[(m * layers + l) * size + r] / 65535) * largest : null),
    };
  }
  const [rows, layer, microBatch] = [byId("load-rows"), byId("load-layer"), byId("load-micro-batch")];
  const canvases = [...root.querySelectorAll("canvas[data-axis]")];
  const PROFILE = 34, LEFT = 30, BOTTOM = 18, BEYOND = "#d55e00";
  const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
  const STOPS = CIVIDIS.map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  const scaleOf = () => data.scales[rows.value]; // ranks and experts have one each: an expert may have many times a rank's share
  const words = (times) => (times === null ? "none" : `${times.toFixed(2)}×`);
  let row = 0; // the cell that is read out: at first the busiest, its column is that of the slider

  function paint(times) {
    const { end } = scaleOf(), place = (Math.min(times, end) / end) * (STOPS.length - 1);
    const low = Math.min(Math.floor(place), STOPS.length - 2);
    return `rgb(${STOPS[low].map((c, i) => Math.round(c + (STOPS[low + 1][i] - c) * (place - low)))})`;
  }

  function columns({ dataset }) { // columns of one picture: how many, the load of a cell, the names
    const plan = data.plans[Number(dataset.plan)], cube = plan[rows.value];
    const [l, m] = [number(layer), number(microBatch)];
    return dataset.axis === "l"
      ? { ...cube, count: cube.layers, input: layer, at: (c, r) => cube.cell(m, c, r), name: (c) => `layer ${data.layers[c]}` }
      : { ...cube, count: cube.micro_batches, input: microBatch, at: (c, r) => cube.cell(c, l, r), name: (c) => `micro-batch ${plan.micro_batches[c]}` };
  }

  function draw(canvas) {
    const { size, count, input, at, name } = columns(canvas), { end } = scaleOf();
    const width = canvas.clientWidth, height = Math.max(48, Math.max(2, Math.min(14, 300 / size)) * size), scale = devicePixelRatio || 1;
    canvas.style.height = `${PROFILE + height + BOTTOM}px`;
    [canvas.width, canvas.height] = [Math.round(width * scale), Math.round((PROFILE + height + BOTTOM) * scale)];
    const context = canvas.getContext("2d"), wide = (width - LEFT) / count, step = height / size;
    context.scale(scale, scale);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const x = (c) => LEFT + c * wide, y = (r) => PROFILE + r * step, soft = colour("--soft");
    const level = (times) => (PROFILE - 4) * (1 - Math.min(times, end) / end);
    const line = (...points) => { context.beginPath(); for (const point of points) context.lineTo(...point); context.stroke(); };
    context.strokeStyle = BEYOND; // hatched: loads beyond the scale
    for (let c = 0; c < count; c++) {
      let busiest = 0;
      for (let r = 0; r < size; r++) {
        const value = at(c, r);
        if (value === null) continue;
        busiest = Math.max(busiest, value);
        context.fillStyle = paint(value);
        context.fillRect(x(c), y(r), Math.ceil(wide), Math.ceil(step));
        if (value > end) line([x(c), y(r + 1)], [x(c + 1), y(r)]);
      }
      context.fillStyle = soft;
      context.fillRect(x(c), level(busiest), wide - (wide > 4 ? 1 : 0), PROFILE - 4 - level(busiest));
    }
    context.clearRect(LEFT, y(size), width, BOTTOM); // cells are drawn a little too large, without seams
    context.strokeStyle = colour("--text");
    context.setLineDash([3, 3]);
    line([LEFT, level(1)], [width, level(1)]);
    context.setLineDash([]);
    context.fillStyle = soft;
    context.textAlign = "right";
    context.fillText("max", LEFT - 5, PROFILE / 2 + 4);
    for (const r of height < 40 ? [0] : [0, size - 1]) context.fillText(r, LEFT - 5, Math.max(PROFILE + 10, y(r + 0.5) + 4));
    if (count > 1) context.fillText(name(count - 1).split(" ")[1], width, y(size) + BOTTOM - 4);
    context.textAlign = "left";
    context.fillText(name(0), LEFT, y(size) + BOTTOM - 4);
    const chosen = number(input);
    if (chosen >= count) return;
    for (const [pen, thick] of wide < 8 ? [["#ffffff", 2], [colour("--accent"), 1]] : [["#ffffff", 4], [colour("--accent"), 2]]) {
      [context.strokeStyle, context.lineWidth] = [pen, thick]; // two tones, visible on dark and on light cells
      context.strokeRect(x(chosen), 1.5, wide, PROFILE + height - 3);
      context.strokeRect(x(chosen), y(row), wide, step);
    }
  }

  function drawScale() {
    const bar = byId("load-scale"), { end, largest } = scaleOf();
    bar.firstElementChild.style.background = `linear-gradient(to right, ${CIVIDIS})`;
    const [mean, last] = bar.querySelectorAll("span");
    mean.style.left = `${100 / end}%`;
    last.textContent = `${end.toFixed(2)}× mean`;
    byId("load-beyond").textContent = `The largest load of one ${rows.value === "ranks" ? "rank" : "instance of an expert"} is ` +
      `${words(largest)} the mean${largest > end ? `; what is beyond ${words(end)} is hatched.` : "."}`;
  }

  function readOut() {
    const kind = rows.value === "ranks" ? "rank" : "expert", l = number(layer), m = number(microBatch);
    const cubes = data.plans.map((plan) => plan[rows.value]);
    const name = data.plans.map((plan) => plan.micro_batches[m]).find((one) => one !== undefined);
    byId("load-layer-value").textContent = root.querySelector('[data-title="m"]').textContent = data.layers[l];
    byId("load-micro-batch-value").textContent = root.querySelector('[data-title="l"]').textContent = name;
    layer.setAttribute("aria-valuetext", `layer ${data.layers[l]}`);
    const node = kind === "rank" && data.ranks_per_node < cubes[0].size ? ` (node ${Math.floor(row / data.ranks_per_node)})` : "";
    byId("load-readout").textContent = `Layer ${data.layers[l]}, micro-batch ${name}: busiest ${kind} ` +
      `${cubes.map((cube) => words(cube.cell(m, l, busiestRow(cube)))).join(" → ")} the mean; ` +
      `${kind} ${row}${node} ${cubes.map((cube) => words(cube.cell(m, l, row))).join(" → ")}.`;
  }

  function busiestRow(cube) {
    const m = Math.min(number(microBatch), cube.micro_batches - 1);
    const values = Array.from({ length: cube.size }, (_, r) => cube.cell(m, number(layer), r));
    return values.indexOf(Math.max(...values));
  }

  function show() {
    for (const canvas of canvases) draw(canvas);
    readOut();
  }

  for (const canvas of canvases) {
    const last = () => data.plans[0][rows.value].size - 1;
    canvas.addEventListener("keydown", (event) => {
      const { input } = columns(canvas);
      if (event.key === "ArrowLeft") input.value = number(input) - 1;
      else if (event.key === "ArrowRight") input.value = number(input) + 1;
      else if (event.key === "ArrowUp") row = Math.max(0, row - 1);
      else if (event.key === "ArrowDown") row = Math.min(last(), row + 1);
      else return;
      event.preventDefault();
      show();
    });
    canvas.addEventListener("click", (event) => {
      const { count, size, input } = columns(canvas), box = canvas.getBoundingClientRect();
      input.value = Math.floor(((event.clientX - box.left - LEFT) / (box.width - LEFT)) * count); // the input keeps it inside
      row = Math.max(0, Math.min(last(), Math.floor(((event.clientY - box.top - PROFILE) / (box.height - PROFILE - BOTTOM)) * size)));
      show();
    });
  }
  function start() { row = busiestRow(data.plans[0][rows.value]); drawScale(); show(); }
  rows.value = "ranks"; // browsers keep a choice over a reload
  [layer.value, microBatch.value] = data.first;
  rows.addEventListener("input", start);
  for (const input of [layer, microBatch]) input.addEventListener("input", show);
  new ResizeObserver(show).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  start();
})();
