// Tables with figures sort on a click on a column's head; empty cells stay last.
const number = (text) => parseFloat(text.replaceAll(",", ""));
const names = new Intl.Collator("en", { numeric: true });

function sort(table, head) {
  const text = (row) => row.cells[head.cellIndex].textContent.trim();
  const [body] = table.tBodies;
  const rows = [...body.rows];
  const full = rows.filter(text);
  const compare = full.every((row) => !isNaN(number(text(row))))
    ? (a, b) => number(text(a)) - number(text(b))
    : (a, b) => names.compare(text(a), text(b));
  const turn = head.ariaSort === "ascending" ? -1 : 1;
  full.sort((a, b) => turn * compare(a, b));
  body.append(...full, ...rows.filter((row) => !text(row)));
  for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
  head.ariaSort = turn > 0 ? "ascending" : "descending";
}

for (const table of document.querySelectorAll("article table")) {
  if (!table.tHead?.querySelector("[style*=right]") || table.tBodies[0].rows.length < 2) continue;
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.innerHTML = head.innerHTML.replaceAll("_", "_<wbr>"); // a name may take several lines
    head.replaceChildren(button);
    button.addEventListener("click", () => sort(table, head));
  }
}

document.querySelector(".md-search").ariaLabel = "Search";

// What scrolls sideways must be reachable with the keyboard.
function focusable() {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, p:has(> img), pre > code"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
}

document$.subscribe(() => requestAnimationFrame(focusable));
addEventListener("resize", focusable);
