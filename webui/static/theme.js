// Before the page is drawn, so that no wrong theme flashes.
"use strict";
(() => {
  const chosen = localStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
})();
