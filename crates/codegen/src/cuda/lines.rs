//! `#line` directives in the text of kernels, so that NVRTC places errors in the files that people write.
//!
//! What a tag prints need not have as many lines as the tag, and a tag with a dash takes the line's end
//! before or after it. So a directive comes before the first line of C after tags, and before and after a
//! file that is included. Where a directive would not stand at the beginning of a line of C it is left out:
//! numbers are then wrong up to the next one.

use std::fmt::Write;

const DIRECTIVE: &str = "#line ";

/// The text of the template file `name`, with directives.
pub(super) fn marked(name: &str, text: &str) -> String {
    let mut out = String::with_capacity(text.len() * 5 / 4);
    let mut state = State { blank: true, fresh: true, lost: true, ..State::default() };
    for (i, line) in text.split_inclusive('\n').enumerate() {
        let (before, parts) = (state.clone(), Parts::of(line, &mut state));
        let starts_line = before.fresh && !before.in_tag() && !parts.trims_before;
        let may = starts_line && before.captures == 0 && !before.continued;
        if let (true, Some(included)) = (may, parts.included) {
            let _ = writeln!(out, "{DIRECTIVE}1 \"{included}\"");
        } else if may && before.lost && parts.prints {
            let _ = writeln!(out, "{DIRECTIVE}{} \"{name}\"", i + 1);
            state.lost = false;
        }
        state.lost |= parts.trims_before || parts.trims_after || !parts.prints && parts.has_tag;
        state.blank &= !parts.prints;
        // Whether the next line begins one of C.
        let kept = before.fresh && !parts.trims_before && !parts.prints;
        state.fresh = state.blank || !parts.trims_after || kept;
        if parts.prints {
            state.continued = line.trim_end().ends_with('\\');
        }
        out += line;
    }
    out
}

/// The line of a file that line `n` of its marked text is, both from 1.
pub(super) fn unmarked(marked: &str, n: usize) -> usize {
    marked.lines().take(n).filter(|line| !line.starts_with(DIRECTIVE)).count()
}

#[derive(Clone, Default)]
#[allow(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
struct State {
    /// What ends the tag that the line begins in.
    tag: Option<&'static str>,
    /// Blocks that are printed elsewhere, such as macros.
    captures: usize,
    /// Nothing was printed yet.
    blank: bool,
    /// The line begins a line of C.
    fresh: bool,
    /// Numbers are wrong.
    lost: bool,
    /// The line before ended in `\`: a directive would be part of it.
    continued: bool,
}

impl State {
    fn in_tag(&self) -> bool {
        self.tag.is_some()
    }
}

/// What a line of a template consists of.
#[derive(Default)]
#[allow(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
struct Parts<'a> {
    has_tag: bool,
    /// There is text beside tags, or between them.
    prints: bool,
    /// It begins with a tag that takes the blanks before it.
    trims_before: bool,
    /// It ends with a tag that takes the blanks after it.
    trims_after: bool,
    /// The file that it includes, and nothing else.
    included: Option<&'a str>,
}

impl<'a> Parts<'a> {
    fn of(line: &'a str, state: &mut State) -> Parts<'a> {
        let mut parts = Parts { has_tag: state.in_tag(), ..Parts::default() };
        let mut rest = line;
        loop {
            if let Some(end) = state.tag {
                let Some(at) = rest.find(end) else { return parts };
                parts.trims_after = rest[..at].ends_with('-');
                rest = &rest[at + end.len()..];
                state.tag = None;
            }
            let start = rest.find("{%").into_iter().chain(rest.find("{#")).chain(rest.find("{{"));
            let Some(at) = start.min() else {
                parts.see(rest);
                return parts;
            };
            parts.see(&rest[..at]);
            let inner = &rest[at + 2..];
            if !parts.prints && !parts.has_tag {
                parts.trims_before = inner.starts_with('-');
            }
            parts.has_tag = true;
            let statement = rest[at..].starts_with("{%");
            state.tag = Some(match &rest[at..at + 2] {
                "{%" => "%}",
                "{#" => "#}",
                _ => "}}",
            });
            if statement {
                parts.statement(inner.trim_start_matches(['-', '+']).trim_start(), line, state);
            }
            rest = inner;
        }
    }

    fn see(&mut self, text: &str) {
        if !text.trim().is_empty() {
            self.prints = true;
            self.trims_after = false;
        }
    }

    fn statement(&mut self, tag: &'a str, line: &str, state: &mut State) {
        let name: &str = tag.split(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or_default();
        let head = tag.split("%}").next().unwrap_or_default();
        match name {
            "macro" | "call" | "filter" => state.captures += 1,
            "set" if !head.contains('=') => state.captures += 1,
            "endmacro" | "endcall" | "endfilter" | "endset" => {
                state.captures = state.captures.saturating_sub(1);
            }
            "include" => {
                let alone = line.trim().starts_with("{%") && line.trim().ends_with("%}");
                let only = alone && line.matches("{%").count() == 1;
                self.included =
                    head.split('"').nth(1).filter(|_| only && head.matches('"').count() == 2);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [(&str, &str); 3] = [
        (
            "main.cu.j2",
            "{#\nKernel(doc: \"d\")\n#}\n{%- from \"macros.j2\" import twice -%}\n{% include \"part.cuh\" %}\n\
             main 6\n{%- if yes %}\nmain 8\n{%- else %}\nmain 10\n{%- endif %}\nmain 12 {{ twice(1) }}\n\
             #define A \\\n{% if yes %}\n    main 15\n{% endif %}\nmain 17\n{% for i in [1, 2] %}\n\
             main 19\n{% endfor %}\n{{ lines }}\nmain 22\n{% set body %}\nmain 24\n{% endset %}\nmain 26\n\
             {% if yes -%}\nlost\n{%- endif -%}\nlost\nmain 31\n",
        ),
        ("part.cuh", "part 1\n\n{% if no %}\npart 4\n{% endif %}\npart 6\n"),
        ("macros.j2", "{%- macro twice(x) -%}\n{{ x }} * 2\n{%- endmacro -%}\n"),
    ];

    fn rendered(mark: bool) -> String {
        let mut env = minijinja::Environment::new();
        for (name, text) in FILES {
            let text = if mark { marked(name, text) } else { text.to_owned() };
            env.add_template_owned(name, text).unwrap_or_else(|e| panic!("{e}"));
        }
        let template = env.get_template("main.cu.j2").unwrap_or_else(|e| panic!("{e}"));
        let context = minijinja::context! { yes => true, no => false, lines => "a\nb\nc" };
        template.render(context).unwrap_or_else(|e| panic!("{e:#}"))
    }

    /// Each line of C that names its place is where the directives before it say, as a compiler counts.
    #[test]
    fn lines_are_where_directives_say() {
        let text = rendered(true);
        let (mut file, mut number, mut seen) = (String::new(), 0, 0);
        for line in text.lines() {
            if let Some(directive) = line.strip_prefix(DIRECTIVE) {
                let (n, name) = directive.split_once(' ').unwrap_or_else(|| panic!("{text}"));
                number = n.parse().unwrap_or_else(|_| panic!("{text}"));
                file = name.trim_matches('"').to_owned();
                continue;
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            if let [stem @ ("main" | "part"), place, ..] = words[..] {
                assert!(file.starts_with(stem), "{line} is in {file}:\n{text}");
                // In a definition that goes on there is no place for a directive.
                assert!(
                    place == number.to_string() || place == "15",
                    "{line} is {number}:\n{text}"
                );
                seen += 1;
            }
            number += 1;
        }
        assert_eq!(seen, 12, "{text}");
    }

    #[test]
    fn directives_change_nothing_else() {
        let (with, without) = (rendered(true), rendered(false));
        let kept: Vec<&str> = with.lines().filter(|l| !l.starts_with(DIRECTIVE)).collect();
        assert_eq!(kept, without.lines().collect::<Vec<_>>(), "{with}");
        assert!(!kept.iter().any(|line| line.contains(DIRECTIVE)), "{with}");
    }

    #[test]
    fn lines_are_counted_back() {
        for (name, text) in FILES {
            let with = marked(name, text);
            let all: Vec<&str> = text.lines().collect();
            for (i, line) in with.lines().enumerate().filter(|(_, l)| !l.starts_with(DIRECTIVE)) {
                assert_eq!(all[unmarked(&with, i + 1) - 1], line);
            }
        }
    }
}
