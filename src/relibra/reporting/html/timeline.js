// Draws timelines of ranks, all on one scale of time; sliders choose layer, zoom and time.
(() => {
  const root = document.getElementById("timeline-explorer");
  if (!root) return;
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("timeline-data").textContent);
  const KINDS = { Uint8Array, Int16Array, Float32Array, Float64Array };
  const unpack = (field) => new KINDS[field.type](Uint8Array.from(atob(field.data), (c) => c.charCodeAt(0)).buffer);
  const FIELDS = ["start", "seconds", "bytes", "between", "layer", "micro_batch", "rank", "stage"];
  const timelines = data.timelines.map((one) => {
    const read = { ...one };
    for (const field of FIELDS) read[field] = unpack(one[field]);
    read.end = read.start.reduce((most, start, i) => Math.max(most, start + read.seconds[i]), 0);
    return read;
  });
  const [layer, zoom, time] = ["timeline-layer", "timeline-zoom", "timeline-move"].map(byId);
  const canvases = [...root.querySelectorAll("canvas[data-timeline]")];
  const total = Math.max(...timelines.map((one) => one.end));
  const LEFT = 58, LANE = 13, GAP = 7, AXIS = 20;
  const STYLES = { // colour and texture: solid, stripes, dots or empty
    attention: ["#0072b2", "solid"], experts: ["#e69f00", "stripes"], "at home": ["#e69f00", "solid"], optimizer: ["#cc79a7", "dots"],
    dispatch: ["#56b4e9", "solid"], combine: ["#009e73", "stripes"],
    "dispatch in node": ["#56b4e9", "dots"], "combine in node": ["#009e73", "dots"],
    push: ["#d55e00", "solid"], return: ["#cc79a7", "stripes"], "wait push": ["#8a8a8a", "empty"], "wait return": ["#8a8a8a", "empty"],
    gradients: ["#f0e442", "dots"],
  };
  const style = (stage) => STYLES[stage] || ["#999999", stage.startsWith("wait") ? "empty" : "solid"];
  let selected = timelines.map(() => -1);

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (input) => Number(input.value);
  const duration = (seconds) => {
    const [unit, factor] = seconds >= 1 ? ["s", 1] : seconds >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
    return `${(seconds * factor).toPrecision(3)} ${unit}`;
  };
  const size = (bytes) => {
    const [unit, factor] = bytes >= 1e9 ? ["GB", 1e9] : bytes >= 1e6 ? ["MB", 1e6] : ["kB", 1e3];
    return `${(bytes / factor).toPrecision(3)} ${unit}`;
  };

  function extent(one) { // the forward pass through the chosen layer: up to the first long pause
    if (number(layer) === 0) return [0, one.end];
    const wanted = data.layers[number(layer) - 1];
    let [first, last] = [Infinity, 0];
    for (let i = 0; i < one.start.length; i++) {
      if (one.layer[i] !== wanted) continue;
      if (one.start[i] < first) first = one.start[i];
    }
    for (let i = 0; i < one.start.length; i++) { // combine ends the forward pass of a layer
      if (one.layer[i] === wanted && one.stages[one.stage[i]][0] === "combine" && (!last || one.start[i] + one.seconds[i] < last)) {
        last = one.start[i] + one.seconds[i];
      }
    }
    return first === Infinity ? [0, one.end] : [first, Math.max(last, first)];
  }

  function windows() { // start of each timeline's window, and the seconds that all of them show
    const extents = timelines.map(extent);
    const whole = Math.max(...extents.map(([a, b]) => b - a)) || total;
    const margin = number(layer) === 0 ? 0 : 0.04 * whole;
    const span = (whole + 2 * margin) / 2 ** (number(zoom) / 4);
    const room = number(layer) === 0 ? whole - span : total - span; // of a layer the window starts there and moves to the end of the step
    const shift = (number(time) / 1000) * Math.max(0, room);
    return { span, starts: extents.map(([a]) => a - margin + shift) };
  }

  const tiles = {};
  function pattern(context, [fill, texture]) {
    if (texture === "solid") return fill;
    const key = `${fill}${texture}${colour("--panel")}`;
    if (!tiles[key]) {
      const tile = document.createElement("canvas"), pen = tile.getContext("2d");
      tile.width = tile.height = 6;
      pen.fillStyle = texture === "empty" ? colour("--panel") : fill;
      pen.fillRect(0, 0, 6, 6);
      pen.strokeStyle = pen.fillStyle = texture === "empty" ? fill : colour("--panel");
      if (texture === "dots") pen.fillRect(2, 2, 2, 2);
      else {
        pen.lineWidth = 1.2;
        pen.beginPath();
        for (const x of [-6, 0, 6]) { pen.moveTo(x, 6); pen.lineTo(x + 6, 0); }
        pen.stroke();
      }
      tiles[key] = tile;
    }
    return context.createPattern(tiles[key], "repeat");
  }

  function draw(canvas, index, start, span) {
    const one = timelines[index], lanes = data.lanes.length, block = lanes * LANE + GAP;
    const width = canvas.clientWidth, height = one.ranks.length * block + AXIS, scale = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const [text, soft, line, accent] = ["--text", "--soft", "--line", "--accent"].map(colour);
    const inner = width - LEFT, x = (seconds) => LEFT + ((seconds - start) / span) * inner;
    context.textBaseline = "middle";
    one.ranks.forEach((rank, i) => {
      context.fillStyle = i % 2 ? colour("--page") : colour("--panel");
      context.fillRect(LEFT, i * block, inner, block);
      context.fillStyle = soft;
      context.textAlign = "left";
      context.fillText(`rank ${rank}`, 0, i * block + (lanes * LANE) / 2 + 2);
    });
    const paints = one.stages.map(([stage]) => pattern(context, style(stage)));
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, inner, height);
    context.clip();
    context.textAlign = "left";
    for (let i = 0; i < one.start.length; i++) {
      const [left, right] = [x(one.start[i]), x(one.start[i] + one.seconds[i])];
      if (right < LEFT || left > width) continue;
      const [stage, lane] = one.stages[one.stage[i]], top = one.rank[i] * block + lane * LANE + 2;
      const wide = Math.max(0.6, right - left);
      context.fillStyle = paints[one.stage[i]];
      context.fillRect(left, top, wide, LANE - 2);
      if (style(stage)[1] === "empty" && wide > 3) {
        context.strokeStyle = soft;
        context.lineWidth = 1;
        context.strokeRect(left + 0.5, top + 0.5, wide - 1, LANE - 3);
      }
      if (i === selected[index]) {
        context.strokeStyle = accent;
        context.lineWidth = 3;
        context.strokeRect(left - 1, top - 1, wide + 2, LANE);
      }
    }
    context.restore();
    context.strokeStyle = line;
    context.beginPath();
    context.moveTo(LEFT, height - AXIS + 1);
    context.lineTo(width, height - AXIS + 1);
    context.stroke();
    context.fillStyle = soft;
    context.textBaseline = "bottom";
    context.textAlign = "left";
    context.fillText(duration(Math.max(0, start)), LEFT, height - 2);
    context.textAlign = "right";
    context.fillText(`+ ${duration(span)}`, width, height - 2);
  }

  function readOut(index) {
    const one = timelines[index], i = selected[index];
    if (i < 0) return;
    const place = [one.layer[i] >= 0 ? `layer ${one.layer[i]}` : "", one.micro_batch[i] >= 0 ? `micro-batch ${one.micro_batch[i]}` : ""];
    byId("timeline-readout").textContent = [
      `${one.name} (${one.label}), rank ${one.ranks[one.rank[i]]}: ${one.stages[one.stage[i]][0]}`,
      ...place.filter(Boolean),
      `${duration(one.seconds[i])} from ${duration(one.start[i])} on`,
      ...(one.bytes[i] ? [size(one.bytes[i])] : []),
      ...(one.between[i] ? [`of them ${size(one.between[i])} to other nodes`] : []),
    ].join(", ");
  }

  function show() {
    const { span, starts } = windows();
    byId("timeline-layer-value").textContent = number(layer) ? data.layers[number(layer) - 1] : "all";
    layer.setAttribute("aria-valuetext", number(layer) ? `layer ${data.layers[number(layer) - 1]}` : "all layers");
    byId("timeline-zoom-value").textContent = `${(2 ** (number(zoom) / 4)).toPrecision(2)}×`.replace("e+3", "000").replace("e+2", "00");
    byId("timeline-move-value").textContent = duration(Math.max(0, starts[0]));
    canvases.forEach((canvas, i) => draw(canvas, i, starts[i], span));
  }

  const move = (input, by) => { input.value = number(input) + by; };
  canvases.forEach((canvas, index) => {
    canvas.addEventListener("keydown", (event) => {
      const one = timelines[index], { span, starts } = windows();
      const step = Math.max(1, Math.round((100 * span) / Math.max(span, total - span)));
      if (event.key === "ArrowLeft") move(time, -step);
      else if (event.key === "ArrowRight") move(time, step);
      else if (event.key === "+" || event.key === "=") move(zoom, 1);
      else if (event.key === "-") move(zoom, -1);
      else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        const by = event.key === "ArrowDown" ? 1 : -1;
        if (selected[index] < 0) selected[index] = Math.max(0, one.start.findIndex((start) => start >= starts[index])) - (by > 0 ? 1 : -1);
        selected[index] = Math.max(0, Math.min(one.start.length - 1, selected[index] + by));
        readOut(index);
      } else return;
      event.preventDefault();
      show();
    });
    canvas.addEventListener("click", (event) => {
      const one = timelines[index], box = canvas.getBoundingClientRect(), { span, starts } = windows();
      const seconds = starts[index] + ((event.clientX - box.left - LEFT) / (box.width - LEFT)) * span;
      const block = data.lanes.length * LANE + GAP, y = event.clientY - box.top;
      const rank = Math.floor(y / block), lane = Math.floor((y % block) / LANE);
      const near = (i) => Math.max(0, one.start[i] - seconds, seconds - one.start[i] - one.seconds[i]);
      let best = -1;
      for (let i = 0; i < one.start.length; i++) {
        if (one.rank[i] === rank && one.stages[one.stage[i]][1] === lane && (best < 0 || near(i) < near(best))) best = i;
      }
      if (best >= 0) { selected[index] = best; readOut(index); show(); }
    });
  });

  const used = [...new Map(timelines.flatMap((one) => one.stages).map(([stage, lane]) => [stage, lane]))];
  byId("timeline-legend").replaceChildren(...used.sort((a, b) => a[1] - b[1]).map(([stage, lane]) => {
    const item = document.createElement("li"), swatch = document.createElement("canvas");
    [swatch.width, swatch.height] = [24, 12];
    swatch.dataset.stage = stage;
    item.append(swatch, `${stage} (${data.lanes[lane]})`);
    return item;
  }));
  function drawLegend() {
    for (const swatch of byId("timeline-legend").querySelectorAll("canvas")) {
      const context = swatch.getContext("2d");
      context.fillStyle = pattern(context, style(swatch.dataset.stage));
      context.fillRect(0, 0, 24, 12);
      context.strokeStyle = colour("--soft");
      context.strokeRect(0.5, 0.5, 23, 11);
    }
  }
  layer.value = data.first; // browsers keep a choice over a reload
  [zoom.value, time.value] = [0, 0];
  for (const input of [layer, zoom, time]) input.addEventListener("input", show);
  layer.addEventListener("input", () => { time.value = 0; show(); });
  new ResizeObserver(show).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawLegend(); show(); });
  drawLegend();
  show();
})();
