# SPDX-License-Identifier: Apache-2.0
"""How the status page looks: one column on a phone, light or dark as the browser asks for."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --line: #d9dde3; --text: #1c2128; --quiet: #59636e;
  --good: #1a7f37; --warn: #8f5a00; --bad: #c4232e; --bar: #4f7cc4; --link: #0a5cc2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1318; --card: #181e25; --line: #303842; --text: #e6eaef; --quiet: #9aa5b1;
    --good: #4ac26b; --warn: #e0a63a; --bad: #ff7b72; --bar: #5b8bd6; --link: #79b0ff;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1rem; max-width: 60rem;
  background: var(--page); color: var(--text);
  font: 1rem/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { margin: 0; font-size: 1.3rem; overflow-wrap: anywhere; }
small { font-weight: 400; }
h2 { margin: 0 0 .5rem; font-size: 1rem; }
p { margin: .2rem 0; overflow-wrap: anywhere; }
section { margin: 1rem 0; padding: .9rem; background: var(--card);
  border: 1px solid var(--line); border-radius: .6rem; }
.cards { display: grid; gap: .75rem; padding: 0; background: none; border: 0;
  grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); }
.card { padding: .8rem .9rem; background: var(--card);
  border: 1px solid var(--line); border-radius: .6rem; }
.card h2 { margin: 0; font-size: .85rem; font-weight: 600; }
.number { font-size: 1.9rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.quiet { color: var(--quiet); font-size: .85rem; }
.state { font-weight: 600; }
.state::before { content: "\\25cf  "; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
table { width: 100%; border-collapse: collapse; font-size: .92rem; }
th { color: var(--quiet); font-size: .8rem; font-weight: 600; text-align: left;
  vertical-align: bottom; }
th, td { padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--line); }
th:last-child, td:last-child { padding-right: 0; }
tr:last-child td { border-bottom: 0; }
td { vertical-align: baseline; overflow-wrap: anywhere; }
td > span { display: block; }
.n { white-space: nowrap; font-variant-numeric: tabular-nums; }
.name, code {
  font: .85rem/1.45 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace;
}
code { display: inline-block; min-width: 15ch; }
.badge { white-space: nowrap; font-weight: 600; }
.up { color: var(--good); } .down { color: var(--bad); } .ejected { color: var(--warn); }
.draining, .unknown { color: var(--quiet); }
.wide { width: 35%; }
svg { display: block; width: 100%; height: .55rem; border-radius: .2rem; background: var(--page); }
rect { fill: var(--bar); }
a { color: var(--link); }
footer { margin: 1rem 0 0; }
@media (max-width: 30rem) { .name { font-size: .8rem; } .wide { width: 20%; } }
"""
