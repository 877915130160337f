//! An encoding's expressions as C: the value at a row and a column, from stored bytes.

use std::fmt::Write;

use infernum_ir::encoding::{Layout, Packing, Place, Table, Term};
use infernum_ir::expr::{BinaryOp, Func};
use infernum_ir::{Encoding, TensorType};

use super::c_expr::literal;

/// `decoded_NAME(w, n, k)`, a value of a matrix at `w`, and what it calls (of `common/stored.cuh`).
pub(super) struct DecoderText {
    /// The functions' text.
    pub(super) text: String,
    /// The name of the function.
    pub(super) function: String,
    /// Bytes of a matrix.
    pub(super) bytes: u64,
    /// Its rows.
    pub(super) rows: u64,
    /// Its columns.
    pub(super) columns: u64,
}

/// The decoder of an encoded weight; `name` is that of the operand.
pub(super) fn decoder(name: &str, ty: &TensorType) -> Option<DecoderText> {
    let encoding = ty.encoding.as_ref().filter(|e| e.packing().is_none())?;
    let [.., rows, columns] = &ty.shape[..] else { return None };
    let layout = encoding.layout(rows.as_const()?, columns.as_const()?).ok()?;
    let mut text = String::new();
    for (i, table) in encoding.tables().iter().enumerate() {
        let (ty, entries): (_, Vec<String>) = match table {
            Table::Whole(list) => ("i64", list.iter().map(|x| format!("{x}ll")).collect()),
            Table::Floats(list) => ("float", list.iter().map(|x| literal(f64::from(*x))).collect()),
        };
        // Writing to a `String` cannot fail.
        let _ = writeln!(
            text,
            "__device__ const {ty} {name}_table{i}[{}] = {{ {} }};",
            entries.len(),
            entries.join(", ")
        );
    }
    for part in 0..layout.parts.len() {
        text += &read(name, &layout, part);
    }
    let function = format!("decoded_{name}");
    let value = value(&Site { name, layout: &layout, encoding });
    let _ = write!(
        text,
        "__device__ __forceinline__ float {function}(const u8* w, i64 n, i64 k) {{\n    return {value};\n}}\n"
    );
    let Layout { rows, columns, bytes, .. } = layout;
    Some(DecoderText { text, function, bytes, rows, columns })
}

/// The constants of a packed weight, for `common/coded.cuh`.
pub(super) struct PackingText {
    /// A struct.
    pub(super) text: String,
    /// Its name.
    pub(super) name: String,
    /// Bytes of a unit.
    pub(super) unit: u64,
    /// Bytes of a matrix.
    pub(super) bytes: u64,
    /// Its rows.
    pub(super) rows: u64,
    /// Its columns.
    pub(super) columns: u64,
    /// Functions that make what it holds of what is stored, which the decoder of operand `w` reads.
    pub(super) repack: String,
}

/// The constants of a packed weight; `name` is that of the operand.
pub(super) fn packing(name: &str, ty: &TensorType) -> Option<PackingText> {
    let encoding = ty.encoding.as_ref()?;
    let packing = encoding.packing()?;
    let list = packing.constants(encoding);
    let struct_name = format!("Packed_{name}");
    let text = format!("struct {struct_name} {{\n    static constexpr int {list};\n}};\n");
    let [.., rows, columns] = &ty.shape[..] else { return None };
    let (rows, columns) = (rows.as_const()?, columns.as_const()?);
    let bytes = encoding.layout(rows, columns).ok()?.bytes;
    let repack = repack(encoding, packing, (rows, columns)).unwrap_or_default();
    Some(PackingText { text, name: struct_name, unit: packing.bytes, bytes, rows, columns, repack })
}

/// `code_of(w, n, k)` and the like, each a whole number (i64) or a float.
fn repack(encoding: &Encoding, packing: &Packing, (rows, columns): (u64, u64)) -> Option<String> {
    let stored = encoding.stored()?;
    let layout = stored.layout(rows, columns).ok()?;
    let site = Site { name: "w", layout: &layout, encoding: &stored };
    let mut text = String::new();
    let mut function = |name: &str, term: Option<&Term>| {
        let (ty, value) = match term {
            Some(term) if term.is_whole() => ("i64", site.c(term)),
            Some(term) => ("float", site.c(term)),
            None => ("float", "0".to_owned()),
        };
        // Writing to a `String` cannot fail.
        let _ = writeln!(
            text,
            "__device__ __forceinline__ {ty} {name}_of(const u8* w, i64 n, i64 k) {{ return {value}; }}"
        );
    };
    let minimum = packing.minimum.as_ref();
    function("code", Some(stored.code()));
    function("scale", Some(&packing.scale.inner_term));
    function("scale_outer", packing.scale.outer_term.as_ref());
    function("minimum", minimum.map(|m| &m.inner_term));
    function("minimum_outer", minimum.and_then(|m| m.outer_term.as_ref()));
    Some(text)
}

/// What terms are printed with.
struct Site<'a> {
    name: &'a str,
    layout: &'a Layout,
    encoding: &'a Encoding,
}

/// Each operation rounds: left to itself the compiler would fuse a product and a sum.
fn value(site: &Site<'_>) -> String {
    let (code, scale) = (site.encoding.code(), site.encoding.scale());
    let code = match site.encoding.zero() {
        Some(zero) => format!("(float)({} - {})", site.c(code), site.c(zero)),
        None => site.float(code),
    };
    let scaled = format!("__fmul_rn({code}, {})", site.c(scale));
    match site.encoding.minimum() {
        Some(minimum) => format!("__fsub_rn({scaled}, {})", site.c(minimum)),
        None => scaled,
    }
}

/// A function that reads element `i0, i1, ..` of a part, the nearest inside.
fn read(name: &str, layout: &Layout, part: usize) -> String {
    let described = &layout.parts[part];
    let (element, size) = (described.element, described.element.size());
    let result = if element.is_whole() { "i64" } else { "float" };
    let indices: String = (0..described.dims.len()).fold(String::new(), |mut all, i| {
        let _ = write!(all, ", i64 i{i}");
        all
    });
    let at =
        described.dims.iter().enumerate().fold("(i64)0".to_owned(), |at, (i, dim)| {
            format!("({at} * {dim} + inside(i{i}, {dim}))")
        });
    let base = match layout.blocks {
        Some(b) => {
            format!("(n * {} + k / {}) * {} + {}", b.row, b.values, b.bytes, described.offset)
        }
        None => format!("(i64){}", described.offset),
    };
    format!(
        "__device__ __forceinline__ {result} {name}_part{part}(const u8* w, i64 n, i64 k{indices}) {{\n    \
         return stored_{element}(w + ({base}) + {at} * {size});\n}}\n"
    )
}

impl Site<'_> {
    fn float(&self, term: &Term) -> String {
        let text = self.c(term);
        if term.is_whole() { format!("(float){text}") } else { text }
    }

    /// A term as an expression of type i64 or float.
    fn c(&self, term: &Term) -> String {
        match term {
            Term::Int(i) => format!("(i64){i}ll"),
            Term::Float(x) => literal(f64::from(*x)),
            Term::Place(Place::N) => "n".to_owned(),
            Term::Place(Place::K) => "k".to_owned(),
            Term::Place(Place::Rows) => format!("(i64){}", self.layout.rows),
            Term::Place(Place::Columns) => format!("(i64){}", self.layout.columns),
            Term::Read { part, index, .. } => {
                let indices = index.iter().fold(String::new(), |all, i| all + ", " + &self.c(i));
                format!("{}_part{part}(w, n, k{indices})", self.name)
            }
            Term::Table { table, index, .. } => {
                let len = self.encoding.tables().get(*table).map_or(1, Table::len);
                format!("{}_table{table}[inside({}, {len})]", self.name, self.c(index))
            }
            Term::Widen(a) => format!("(float){}", self.c(a)),
            Term::Neg(a) => format!("(-{})", self.c(a)),
            Term::Not(a) => format!("(i64)({} == 0)", self.c(a)),
            Term::Binary(op, a, b) => binary(*op, a.is_whole(), &self.c(a), &self.c(b)),
            Term::Divide { up, a, b } => {
                let function = if *up { "divide_up" } else { "divide_down" };
                format!("{function}({}, {})", self.c(a), self.c(b))
            }
            Term::Call(func, args) => {
                let all: Vec<String> = args.iter().map(|a| self.c(a)).collect();
                let function = match (func, term.is_whole()) {
                    (Func::Abs, true) => "whole_abs",
                    (Func::Min, true) => "whole_min",
                    (Func::Max, true) => "whole_max",
                    (Func::Abs, false) => "fabsf",
                    (Func::Min, false) => "fminf",
                    (Func::Max, false) => "fmaxf",
                    (Func::Ceil, _) => "ceilf",
                    (Func::Round, _) => "rintf",
                    // Others are refused when an encoding is read.
                    _ => "floorf",
                };
                format!("{function}({})", all.join(", "))
            }
            Term::Select(parts) => {
                let [c, a, b] = &**parts;
                format!("({} != 0 ? {} : {})", self.c(c), self.c(a), self.c(b))
            }
        }
    }
}

fn binary(op: BinaryOp, whole: bool, a: &str, b: &str) -> String {
    let test = |sign: &str| format!("(i64)({a} {sign} {b})");
    let arithmetic = |sign: &str, function: &str| {
        if whole { format!("({a} {sign} {b})") } else { format!("{function}({a}, {b})") }
    };
    match op {
        BinaryOp::Add => arithmetic("+", "__fadd_rn"),
        BinaryOp::Sub => arithmetic("-", "__fsub_rn"),
        BinaryOp::Mul => arithmetic("*", "__fmul_rn"),
        BinaryOp::Div => format!("__fdiv_rn({a}, {b})"),
        BinaryOp::Rem => format!("remainder_of({a}, {b})"),
        BinaryOp::Pow => format!("whole_power({a}, {b})"),
        BinaryOp::Lt => test("<"),
        BinaryOp::Le => test("<="),
        BinaryOp::Gt => test(">"),
        BinaryOp::Ge => test(">="),
        BinaryOp::Eq => test("=="),
        BinaryOp::Ne => test("!="),
        BinaryOp::And => format!("(i64)({a} != 0 && {b} != 0)"),
        BinaryOp::Or => format!("(i64)({a} != 0 || {b} != 0)"),
        BinaryOp::BitOr => format!("({a} | {b})"),
        BinaryOp::BitXor => format!("({a} ^ {b})"),
        BinaryOp::BitAnd => format!("({a} & {b})"),
        BinaryOp::Shl => format!("(i64)((u64){a} << inside({b}, 64))"),
        BinaryOp::Shr => format!("({a} >> inside({b}, 64))"),
        BinaryOp::Coalesce => a.to_owned(), // refused when an encoding is read
    }
}

#[cfg(test)]
mod tests {
    use infernum_ir::TensorType;
    use infernum_passes::data::Kernels;

    #[test]
    fn formulas_print_as_c() {
        let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
        let text = |name: &str| {
            let encoding = kernels.ops.encoding(name).expect("a built-in encoding").clone();
            let ty = TensorType::encoded(encoding, &[192, 256]);
            super::decoder("w", &ty).expect("a decoder").text
        };
        let blocks = text("q4_0");
        for line in [
            "    return stored_u8(w + ((n * 8 + k / 32) * 18 + 2) + ((i64)0 * 16 + inside(i0, 16)) * 1);",
            "    return __fmul_rn((float)(((w_part1(w, n, k, (k & (i64)15ll)) >> inside((((k >> inside((i64)4ll, 64)) \
             & (i64)1ll) * (i64)4ll), 64)) & (i64)15ll) - (i64)8ll), w_part0(w, n, k));",
        ] {
            assert!(blocks.contains(line), "{blocks}\n{line}");
        }
        let levels = text("iq4_nl");
        for line in [
            "__device__ const i64 w_table0[16] = { -127ll, -104ll,",
            "__fmul_rn((float)w_table0[inside(((w_part1(",
        ] {
            assert!(levels.contains(line), "{levels}\n{line}");
        }
        let squares = text("fp8_block");
        for line in [
            "float w_part0(const u8* w, i64 n, i64 k, i64 i0, i64 i1) {",
            "    return stored_f32(w + ((i64)49152) + (((i64)0 * 2 + inside(i0, 2)) * 2 + inside(i1, 2)) * 4);",
            "    return __fmul_rn(w_part0(w, n, k, n, k), \
             w_part1(w, n, k, divide_down(n, (i64)128ll), divide_down(k, (i64)128ll)));",
        ] {
            assert!(squares.contains(line), "{squares}\n{line}");
        }
    }
}
