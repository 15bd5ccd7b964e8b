// Colours links by their load at the chosen slice, and shows rates and loads of it in the tables.
"use strict";
window.onerror = function (message) { document.body.setAttribute("data-error", message); };
(function () {
  var data = document.getElementById("data").dataset;
  var table = function (text) {
    return text.split(";").map(function (line) { return line.split(" ").map(Number); });
  };
  var loads = table(data.loads), rates = table(data.rates), times = data.times.split(";");
  var slider = document.getElementById("slider"), when = document.getElementById("when");
  // From grey over yellow to red.
  var colour = function (load) {
    if (5 > load) { return "#94a3b8"; }
    var hue = Math.round(210 - 210 * load / 1000);
    return "hsl(" + hue + ", 75%, 40%)";
  };
  var rate = function (bytes) {
    var names = ["B/s", "kB/s", "MB/s", "GB/s"], at = 0;
    while (bytes >= 1000 ? 3 > at : false) { bytes = bytes / 1000; at = at + 1; }
    return bytes.toPrecision(3) + " " + names[at];
  };
  var show = function (slice) {
    slider.value = slice;
    when.textContent = times[slice];
    document.body.setAttribute("data-slice", slice);
    document.querySelectorAll("g[data-link]").forEach(function (link) {
      var first = 2 * Number(link.getAttribute("data-link"));
      var turned = link.getAttribute("data-turned") === "1";
      link.querySelectorAll("path").forEach(function (path, side) {
        var load = loads[slice][first + (turned ? 1 - side : side)];
        path.setAttribute("stroke", colour(load));
        path.setAttribute("stroke-width", (1.4 + 7 * load / 1000).toFixed(1));
      });
    });
    document.querySelectorAll("tr[data-link]").forEach(function (row) {
      var first = 2 * Number(row.getAttribute("data-link"));
      [0, 1].forEach(function (side) {
        row.cells[2 + side].textContent = (loads[slice][first + side] / 10).toFixed(1) + " %";
      });
    });
    document.querySelectorAll("tr[data-flow]").forEach(function (row) {
      row.cells[1].textContent = rate(rates[slice][Number(row.getAttribute("data-flow"))]);
    });
  };
  var chosen = function () {
    var slice = Number(window.location.hash.slice(1));
    return times[slice] === undefined ? 0 : slice;
  };
  slider.addEventListener("input", function () { show(Number(slider.value)); });
  window.addEventListener("hashchange", function () { show(chosen()); });
  var timer = null, button = document.getElementById("play");
  button.addEventListener("click", function () {
    if (timer !== null) {
      clearInterval(timer);
      timer = null;
      button.textContent = "Play";
      return;
    }
    button.textContent = "Stop";
    timer = setInterval(function () {
      show((Number(slider.value) + 1) % times.length);
    }, 200);
  });
  show(chosen());
}());
