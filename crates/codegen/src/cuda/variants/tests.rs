//! What templates come to, and errors of lists of variants.

use super::super::Template;
use super::*;

/// What every template comes to: the order of its variants, and each distinct variant once.
fn listing(library: &Library) -> String {
    let (mut launches, mut variants) = (Vec::new(), BTreeMap::new());
    let mut names: Vec<&str> = Library::built_in().collect();
    names.sort_unstable();
    let mut lines = Vec::new();
    for name in names {
        let template = library.template(name).unwrap_or_else(|e| panic!("{e}"));
        let order: Vec<&str> = template.variants.iter().map(|v| v.name.as_str()).collect();
        lines.push(format!("{name}: {}", order.join(" ")));
        for Variant { name: variant, when, params, kind, order } in &template.variants {
            let launch = match kind {
                Kind::Kernel { grid, block, shared, scratch, ahead, ptx, tiles } => {
                    let grid: Vec<String> = grid.iter().map(Expr::to_string).collect();
                    let shown = |t: &Tiles| {
                        let dealt = if t.dealt { " dealt" } else { "" };
                        format!("{}: {}{dealt}", t.operand, t.rows)
                    };
                    let tiles: Vec<_> = tiles.iter().map(shown).collect();
                    assert!(ptx.is_none(), "{name}: none of ours is foreign");
                    format!(
                        "[{}] x {block}, shared {shared}, scratch {scratch}, ahead {}, tiles {{{}}}",
                        grid.join(", "),
                        ahead.as_ref().map_or("none".to_owned(), Expr::to_string),
                        tiles.join(", ")
                    )
                }
                Kind::Matmul(roles) => format!("{roles:?}"),
            };
            let known = launches.iter().position(|l| *l == launch);
            let at = known.unwrap_or_else(|| {
                launches.push(launch);
                launches.len() - 1
            });
            let when: Vec<String> = when.iter().map(Expr::to_string).collect();
            let constants: Vec<_> = params.iter().map(|(k, v)| format!("{k} {v}")).collect();
            let constants = constants.join(", ");
            let order = order.as_ref().map_or(String::new(), |o| format!(", order {o}"));
            let about =
                format!("launch {}, {{{constants}}}, when {}{order}", at + 1, when.join("; "));
            let key = (variant.clone(), about);
            variants.entry(key).or_insert_with(Vec::new).push(name);
        }
    }
    lines.push(String::new());
    let launches = launches.iter().enumerate();
    lines.extend(launches.map(|(i, launch)| format!("launch {}: {launch}", i + 1)));
    let variants = variants.iter().map(|((variant, about), templates)| {
        format!("{variant} of {}: {about}", templates.join(", "))
    });
    lines.extend(variants);
    lines.join("\n")
}

/// A list that is lost, or a condition that is not what it was, shows here.
#[test]
fn every_template_has_the_variants_that_it_had() {
    insta::assert_snapshot!(listing(&Library::default()));
}

/// A library with `DIR/kernels/templates/variants` of these files, and what a template of them has.
fn expanded(lists: &[(&str, &str)], variants: &str) -> Result<Vec<Variant>, String> {
    let data = tempfile::tempdir().expect("a folder");
    let folder = data.path().join("kernels/templates/variants");
    std::fs::create_dir_all(&folder).expect("a folder");
    for (name, text) in lists {
        std::fs::write(folder.join(format!("{name}.ron")), text).expect("a file");
    }
    let text = format!("{{#\nKernel(doc: \"d\", variants: [\n{variants}\n])\n#}}\n");
    let library = Library::new(Some(data.path()));
    let template = Template::parse(&library, "t", "t.cu.j2", &text);
    let shown = |e: TemplateError| e.to_string().replace(&folder.display().to_string(), "DIR");
    template.map(|t| t.variants).map_err(shown)
}

fn list(takes: &str, defaults: &str, variants: &str) -> String {
    format!(
        "List(doc: \"d\", takes: {{{takes}}}, defaults: {{{defaults}}}, variants: [{variants}])"
    )
}

fn shown(variants: &[Variant]) -> Vec<String> {
    let one = |v: &Variant| {
        let when: Vec<String> = v.when.iter().map(Expr::to_string).collect();
        let Kind::Kernel { grid, block, shared, .. } = &v.kind else { return v.name.clone() };
        let grid: Vec<String> = grid.iter().map(Expr::to_string).collect();
        let (when, grid) = (when.join(", "), grid.join(", "));
        format!("{}: {when}; {:?}; {grid} x {block}, {shared}", v.name, v.params)
    };
    variants.iter().map(one).collect()
}

#[test]
fn groups_add_conditions_and_constants_and_give_way_in_the_rest() {
    let variants = r#"Group(when: ["x.cols > 1"], params: {"a": 1, "b": 2}, grid: ["T"], block: "64", variants: [
        Variant(name: "one"),
        Group(when: ["x.cols > 2"], params: {"b": 3}, block: "128", variants: [
            Variant(name: "two", when: ["x.cols > 3"], params: {"c": 4}, grid: ["B", "2"], shared: "8"),
        ]),
    ]), Variant(name: "three")"#;
    let found = expanded(&[], variants).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(
        shown(&found),
        [
            r#"one: x.cols > 1; {"a": 1.0, "b": 2.0}; T x 64, 0"#,
            r#"two: x.cols > 1, x.cols > 2, x.cols > 3; {"a": 1.0, "b": 3.0, "c": 4.0}; B, 2 x 128, 8"#,
            r"three: ; {};  x 256, 0",
        ]
    );
}

#[test]
fn lists_see_what_they_are_given() {
    let inner = list(
        r#""of": "a matrix", "rows": "", "odd": """#,
        r#""odd": "false""#,
        r#"Variant(name: "even", when: ["odd ? of.cols % 2 == 1 : true"], grid: ["rows / 2"]),
           Variant(name: "odd", when: ["odd", "of.cols > 1"], grid: ["rows"])"#,
    );
    // What a list gives another is said in its own names.
    let outer =
        list(r#""n": """#, "", r#"List(name: "inner", given: {"of": "w", "rows": "n + 1"})"#);
    let lists = [("inner", inner.as_str()), ("outer", outer.as_str())];
    let found = expanded(&lists, r#"List(name: "outer", given: {"n": "x.rows * 2"})"#);
    assert_eq!(
        shown(&found.expect("they are there")),
        ["even: ; {}; (x.rows * 2 + 1) / 2 x 256, 0"]
    );
    let given = r#"Group(when: ["x.cols > 5"], variants: [List(name: "inner", given: {"of": "x", "rows": "T", "odd": "true"})])"#;
    assert_eq!(
        shown(&expanded(&lists, given).expect("they are there")),
        [
            "even: x.cols > 5, x.cols % 2 == 1; {}; T / 2 x 256, 0",
            "odd: x.cols > 5, x.cols > 1; {}; T x 256, 0"
        ]
    );
}

/// A list of the user's hides ours of that name, and may begin from it.
#[test]
fn a_users_list_may_add_to_the_one_that_it_hides() {
    let names = |lists: &[(&str, &str)]| {
        let found = expanded(lists, r#"List(name: "rows")"#).unwrap_or_else(|e| panic!("{e}"));
        found.into_iter().map(|v| v.name).collect::<Vec<_>>()
    };
    assert_eq!(names(&[]), ["warp", "block", "large"]);
    let more = list("", "", r#"Variant(name: "mine", when: ["x.cols == 7"]), List(name: "rows")"#);
    assert_eq!(names(&[("rows", &more)]), ["mine", "warp", "block", "large"]);
    assert_eq!(names(&[("rows", &list("", "", r#"Variant(name: "mine")"#))]), ["mine"]);
}

/// Each says the file, the place and what was expected.
#[test]
fn errors_have_a_place() {
    let sum = format!("Variant(name: \"one\", when: [\"{}n > 1\"])", "n + ".repeat(60));
    let lists = [
        ("takes", list(r#""n": "how many""#, "", r#"Variant(name: "one", when: ["n > 1"])"#)),
        ("first", list("", "", r#"List(name: "second")"#)),
        ("second", list("", "", r#"List(name: "first")"#)),
        ("reserved", list(r#""T": """#, "", "")),
        ("default", list("", r#""m": "1""#, "")),
        ("broken", "List(doc: \"d\", variant: [])".to_owned()),
        ("sum", list(r#""n": """#, "", &sum)),
        ("none", list("", "", "")),
    ];
    let lists = lists.each_ref().map(|(name, text)| (*name, text.as_str()));
    let many = r#"List(name: "none"),"#.repeat(65);
    let cases = [
        r#"List(name: "takez", given: {"n": "1"})"#,
        r#"List(name: "../takes", given: {"n": "1"})"#,
        r#"List(name: "takes")"#,
        r#"List(name: "takes", given: {"n": "1", "m": "2"})"#,
        r#"List(name: "takes", given: {"n": "1 +"})"#,
        r#"List(name: "takes", given: {"n": "2"}), Variant(name: "one")"#,
        r#"Variant(name: "one"), List(name: "takes", given: {"n": "x.rows"})"#,
        r#"List(name: "takes", given: {"n": "'two'"})"#,
        r#"List(name: "first")"#,
        r#"List(name: "reserved", given: {"T": "2"})"#,
        r#"List(name: "default")"#,
        r#"List(name: "broken")"#,
        r#"Variant(name: "one", when: ["x.cols >"])"#,
        r#"Group(name: "one", variants: [])"#,
        r#"List(name: "sum", given: {"n": "x.rows * x.cols * w.rows * w.cols * y.rows * y.cols * z.rows * z.cols * u.rows * u.cols"})"#,
        &many,
    ];
    let errors = cases.map(|variants| expanded(&lists, variants).expect_err(variants));
    insta::assert_snapshot!(errors.join("\n\n"));
}
