"use strict";
// Without this script the page is whole: tables are tables and plots are pictures. It adds sorting, filters, and plots
// that answer to a pointer.
(() => {
  const MOST_SHOWN = 200;

  const element = (name, properties = {}, children = []) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };

  const valueOf = (cell) => {
    const text = cell.textContent.trim();
    const number = cell.dataset.sort !== undefined ? Number(cell.dataset.sort) : Number.NaN;
    return { text, number, empty: text === "" };
  };

  // Numbers by size before words; what is empty comes last, whichever way.
  const compare = (one, other, way) => {
    if (one.empty || other.empty) return Number(one.empty) - Number(other.empty);
    const numbers = [Number.isNaN(one.number), Number.isNaN(other.number)];
    if (numbers[0] !== numbers[1]) return Number(numbers[0]) - Number(numbers[1]);
    if (!numbers[0]) return way * (one.number - other.number);
    return way * one.text.localeCompare(other.text, "en", { numeric: true });
  };

  const makeTable = (holder) => {
    const table = holder.querySelector("table");
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    const rows = [...body.rows];
    const status = element("p", { className: "note" });
    status.setAttribute("role", "status");
    const picks = new Map();
    let words = [];
    let most = MOST_SHOWN;

    const fits = (row) =>
      [...picks].every(([place, wanted]) => wanted === "" || row.cells[place].textContent.trim() === wanted) &&
      words.every((word) => row.textContent.toLowerCase().includes(word));

    const show = () => {
      let count = 0;
      for (const row of body.rows) {
        const fit = fits(row);
        count += Number(fit);
        row.hidden = !fit || count > most;
      }
      const shown = Math.min(count, most);
      const filtered = count < rows.length ? `${count} of ${rows.length} rows fit` : `${rows.length} rows`;
      status.textContent = shown < count ? `${filtered}, the first ${shown} are shown` : filtered;
      all.hidden = shown === count;
    };

    const all = element("button", { type: "button", textContent: "Show all", hidden: true });
    all.addEventListener("click", () => {
      most = Infinity;
      show();
    });

    heads.forEach((head, place) => {
      if (rows.length < 2) return;
      const button = element("button", { type: "button", title: "sort" }, [...head.childNodes]);
      head.append(button);
      button.addEventListener("click", () => {
        const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        heads.forEach((one) => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
        const keyed = rows.map((row, number) => ({ row, number, value: valueOf(row.cells[place]) }));
        keyed.sort((one, other) => compare(one.value, other.value, way) || one.number - other.number);
        body.append(...keyed.map((one) => one.row));
        show();
      });
    });

    const controls = element("div", { className: "controls" });
    if (holder.dataset.filters !== undefined) {
      const input = element("input", { type: "search", autocomplete: "off" });
      controls.append(element("label", {}, ["Filter", input]));
      input.addEventListener("input", () => {
        words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
        show();
      });
      heads.forEach((head, place) => {
        const choices = head.dataset.choices === undefined ? [] : JSON.parse(head.dataset.choices);
        if (choices.length === 0) return;
        const options = choices.map((choice) => element("option", { value: choice, textContent: choice }));
        const select = element("select", {}, [element("option", { value: "", textContent: "all" }), ...options]);
        controls.append(element("label", {}, [head.textContent.trim(), select]));
        select.addEventListener("change", () => {
          picks.set(place, select.value);
          show();
        });
      });
    }
    if (holder.dataset.filters !== undefined || rows.length > MOST_SHOWN) {
      controls.append(all);
      holder.prepend(controls, status);
      show();
    }
  };

  const makeFigure = (figure) => {
    const held = figure.querySelector("script[data-specification]");
    if (held === null || typeof vegaEmbed !== "function") return;
    const picture = figure.querySelector(".picture");
    const place = element("div", { className: "explored", hidden: true });
    const title = figure.querySelector("strong").textContent;
    // It may be wider than the window: whoever has no pointer scrolls it by keys.
    place.tabIndex = 0;
    place.setAttribute("role", "region");
    place.setAttribute("aria-label", title);
    const button = element("button", { type: "button", className: "explore", textContent: "Explore this plot" });
    button.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-label", `Explore this plot: ${title}`);
    picture.after(place, button);
    let begun = false;
    button.addEventListener("click", async () => {
      const pressed = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(pressed));
      if (pressed && !begun) {
        begun = true;
        try {
          // Errors alone are logged. "ast": expressions are walked, never compiled, so that the page's policy needs no
          // exception.
          const options = {
            mode: "vega-lite", ast: true, actions: false, logLevel: 1, renderer: "svg", defaultStyle: false,
            tooltip: { disableDefaultStyle: true },
          };
          await vegaEmbed(place, JSON.parse(held.textContent), options);
        } catch (error) {
          place.textContent = `This plot cannot be explored here: ${error.message}`;
        }
      }
      place.hidden = !pressed;
      picture.hidden = pressed;
    });
  };

  document.querySelectorAll("[data-grid]").forEach(makeTable);
  document.querySelectorAll("figure").forEach(makeFigure);
})();
