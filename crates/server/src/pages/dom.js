"use strict";
/* What the pages make their elements of. Text enters them as text, never as markup: the policy of both pages refuses
   the ways to do otherwise. */

/** An element with children: nodes, and texts. */
function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  // One by one: as arguments of one call, many would overflow the stack.
  for (const child of children) made.append(child);
  return made;
}

/** A button; `action` is told which. */
function button(className, label, action) {
  const made = element("button", className, label);
  made.type = "button";
  made.onclick = () => action(made);
  return made;
}

/** Code under a line that says what it is, with a button that copies it. */
function codeFigure(title, code) {
  const copy = button("quiet", "Copy", (b) => copyText(code, b));
  copy.setAttribute("aria-label", "Copy the code");
  const pre = element("pre", "", element("code", "", code));
  pre.tabIndex = 0; // what scrolls can be scrolled by keys
  return element("figure", "", element("figcaption", "", element("span", "", title), copy), pre);
}

async function copyText(text, button) {
  const label = button.textContent;
  try { await navigator.clipboard.writeText(text); } catch {
    // Without HTTPS there is no clipboard: a selection and the old command do it.
    const area = element("textarea", "", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1200);
}
