//! From stored bytes to values, one at a time: the reference of every kernel that decodes.

use super::run::{RUN, Run};
use super::term::Memory;
use super::{Encoding, Layout, Number, Place, Term};

/// A weight `[N, K]` and its stored bytes.
pub struct Decoder<'a> {
    encoding: &'a Encoding,
    layout: Layout,
    /// The stored tensors.
    tensors: Vec<&'a [u8]>,
}

impl Encoding {
    /// A decoder of a weight of `rows` by `columns` over its stored tensors; an error where they are
    /// not of their sizes.
    pub fn decoder<'a>(
        &'a self,
        rows: u64,
        columns: u64,
        tensors: Vec<&'a [u8]>,
    ) -> Result<Decoder<'a>, String> {
        let expected: Vec<u64> =
            self.tensors("", rows, columns)?.into_iter().map(|t| t.bytes).collect();
        let found: Vec<u64> = tensors.iter().map(|t| t.len() as u64).collect();
        if expected != found {
            return Err(format!("{self}: expected tensors of {expected:?} bytes, found {found:?}"));
        }
        Ok(Decoder { encoding: self, layout: self.layout(rows, columns)?, tensors })
    }

    /// A decoder over the bytes of the whole, where tensors lie as [`Encoding::layout`] says.
    pub fn decoder_of<'a>(
        &'a self,
        rows: u64,
        columns: u64,
        bytes: &'a [u8],
    ) -> Result<Decoder<'a>, String> {
        let tensors = self.tensors("", rows, columns)?;
        let part = |from: u64, len: u64| bytes.get(from as usize..(from + len) as usize);
        let parts = tensors.iter().map(|t| part(t.offset, t.bytes)).collect::<Option<Vec<_>>>();
        let short = || format!("{self}: {} bytes are too few for [{rows}, {columns}]", bytes.len());
        self.decoder(rows, columns, parts.ok_or_else(short)?)
    }
}

impl Decoder<'_> {
    /// Rows of the weight.
    pub fn rows(&self) -> u64 {
        self.layout.rows
    }

    /// Columns of the weight.
    pub fn columns(&self) -> u64 {
        self.layout.columns
    }

    pub(super) fn encoding(&self) -> &Encoding {
        self.encoding
    }

    /// Writes the values of row `n` from column `from` on.
    pub fn row(&self, n: u64, from: u64, out: &mut [f32]) {
        let group = self.encoding.def().group.k.unwrap_or(self.layout.columns);
        let (mut k, mut out) = (from, out);
        while !out.is_empty() {
            let len = (group - k % group).min(out.len() as u64);
            let (now, rest) = out.split_at_mut(len as usize);
            let first = self.at(n, k);
            let scale = self.encoding.scale().eval(&first).float();
            let minimum = self.encoding.minimum().map(|m| m.eval(&first).float());
            let zero = self.encoding.zero().map(|z| z.eval(&first).int());
            for (i, values) in now.chunks_mut(RUN).enumerate() {
                let run = Run::new(self, n, (k + (i * RUN) as u64, k + len), 1);
                let codes = run.eval(self.encoding.code());
                for (i, value) in values.iter_mut().enumerate() {
                    let scaled = from_zero(codes.get(i), zero) * scale;
                    *value = minimum.map_or(scaled, |m| scaled - m);
                }
            }
            (k, out) = (k + len, rest);
        }
    }

    /// The code of a value.
    pub fn code(&self, n: u64, k: u64) -> Number {
        self.encoding.code().eval(&self.at(n, k))
    }

    /// What is subtracted from the code of a value; 0 where nothing is.
    pub fn zero(&self, n: u64, k: u64) -> i64 {
        self.encoding.zero().map_or(0, |z| z.eval(&self.at(n, k)).int())
    }

    /// The scale of a value.
    pub fn scale(&self, n: u64, k: u64) -> f32 {
        self.encoding.scale().eval(&self.at(n, k)).float()
    }

    /// The minimum of a value; 0 where there is none.
    pub fn minimum(&self, n: u64, k: u64) -> f32 {
        self.encoding.minimum().map_or(0.0, |m| m.eval(&self.at(n, k)).float())
    }

    /// The stored bytes from the block of a value on, of what is stored in blocks.
    pub(super) fn block(&self, n: u64, k: u64) -> &[u8] {
        let at = self.layout.blocks.map_or(0, |b| (n * b.row + k / b.values) * b.bytes);
        self.tensors[0].get(at as usize..).unwrap_or_default()
    }

    /// Where everything lies.
    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Bytes of a stored tensor; nothing where they end behind it. Sizes were checked, so that there is always an element.
    #[inline]
    pub(super) fn bytes(&self, (tensor, at): (usize, usize), size: u64) -> &[u8] {
        self.tensors[tensor].get(at..at + size as usize).unwrap_or_default()
    }

    pub(super) fn at(&self, n: u64, k: u64) -> At<'_> {
        At { decoder: self, n, k }
    }
}

/// A code as a float, once its zero is subtracted.
fn from_zero(code: Number, zero: Option<i64>) -> f32 {
    match zero {
        Some(zero) => Number::Int(code.int().wrapping_sub(zero)).float(),
        None => code.float(),
    }
}

/// A value of a weight.
pub(super) struct At<'a> {
    decoder: &'a Decoder<'a>,
    n: u64,
    k: u64,
}

impl Memory for At<'_> {
    fn place(&self, place: Place) -> i64 {
        self.decoder.layout.number(place, self.n, self.k)
    }

    fn read(&self, part: usize, index: &[Term]) -> Number {
        let layout = &self.decoder.layout;
        let at = layout.place(self.n, self.k, part, |i| index[i].eval(self).int());
        let element = layout.parts[part].element;
        element.read(self.decoder.bytes(at, element.size()))
    }

    fn table(&self, table: usize, index: i64) -> Number {
        self.decoder.encoding.tables()[table].entry(index)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Code, CodeKind, EncodingDef, FaultIn, Group, Stored};
    use super::*;

    fn blocks() -> EncodingDef {
        let field = |name: &str, ty: &str| (name.to_owned(), ty.to_owned());
        EncodingDef {
            name: "small".to_owned(),
            doc: String::new(),
            stored: Stored::Blocks {
                values: 4,
                fields: vec![field("d", "f16"), field("low", "i8"), field("q", "u8 [2]")],
            },
            tables: Vec::new(),
            constants: Vec::new(),
            lets: Vec::new(),
            zero: None,
            group: Group { n: Some(1), k: Some(4) },
            code: Code {
                kind: CodeKind::Unsigned,
                bits: 4,
                value: "k % 4 < 2 ? q[k % 2] % 16 : floor(q[k % 2] / 16)".to_owned(),
            },
            scale: "d".to_owned(),
            minimum: Some("low".to_owned()),
            when: None,
            activations: None,
            gguf: None,
            packed: false,
        }
    }

    fn squares() -> EncodingDef {
        let tensor = |name: &str, ty: &str| (name.to_owned(), ty.to_owned());
        EncodingDef {
            name: "squares".to_owned(),
            stored: Stored::Tensors {
                of: "weight".to_owned(),
                tensors: vec![
                    tensor("weight", "f8e4m3 [N, K]"),
                    tensor("scales", "f32 [ceil(N / 2), ceil(K / 3)]"),
                ],
                broadcast: vec!["scales".to_owned()],
                unused: Vec::new(),
            },
            group: Group { n: Some(2), k: Some(3) },
            code: Code { kind: CodeKind::E4m3, bits: 8, value: "weight[n][k]".to_owned() },
            scale: "scales[floor(n / 2)][floor(k / 3)]".to_owned(),
            minimum: None,
            ..blocks()
        }
    }

    #[test]
    fn blocks_are_read_by_their_fields() {
        let encoding = Encoding::new(blocks()).expect("a definition");
        assert_eq!(encoding.bytes(&[3, 2, 8]), Some(3 * 2 * 2 * 5));
        assert_eq!(encoding.bytes(&[2, 6]), None);
        assert_eq!(encoding.bytes(&[1 << 46, 4]), Some((1 << 46) * 5));
        // Two rows of one block: f16 1 and -2; minima 1 and -1.
        let bytes = [0x00, 0x3c, 1, 0x21, 0x43, 0x00, 0xc0, 0xff, 0xf0, 0x0f];
        let decoder = encoding.decoder_of(2, 4, &bytes).expect("enough bytes");
        let mut row = [0.0; 4];
        decoder.row(0, 0, &mut row);
        assert_eq!(row, [0.0, 2.0, 1.0, 3.0]);
        decoder.row(1, 0, &mut row);
        assert_eq!(row, [1.0, -29.0, -29.0, 1.0]);
        let mut part = [0.0; 2];
        decoder.row(1, 2, &mut part);
        assert_eq!(part, row[2..]);
        assert!(encoding.decoder_of(2, 4, &bytes[1..]).is_err());
    }

    #[test]
    fn tensors_lie_beside_one_another() {
        let encoding = Encoding::new(squares()).expect("a definition");
        let tensors = encoding.tensors("a.b.weight", 3, 4).expect("tensors");
        let shown: Vec<_> =
            tensors.iter().map(|t| (t.name.as_str(), &t.shape[..], t.offset, t.bytes)).collect();
        assert_eq!(shown, [("a.b.weight", &[3, 4][..], 0, 12), ("a.b.scales", &[2, 2], 16, 16)]);
        assert_eq!(encoding.layout(3, 4).expect("a layout").bytes, 32);
        assert!(encoding.is_for("a.b.weight") && !encoding.is_for("a.b.bias"));
        let scales: Vec<u8> = [1f32, 2.0, 4.0, 0.5].iter().flat_map(|x| x.to_le_bytes()).collect();
        // 1, but -2 in the last place.
        let mut codes = [0x38; 12];
        codes[11] = 0xc0;
        let decoder = encoding.decoder(3, 4, vec![&codes, &scales]).expect("their sizes");
        let mut row = [0.0; 4];
        decoder.row(1, 0, &mut row);
        assert_eq!(row, [1.0, 1.0, 1.0, 2.0]);
        decoder.row(2, 0, &mut row);
        assert_eq!(row, [4.0, 4.0, 4.0, -1.0]);
        assert!(encoding.decoder(3, 4, vec![&codes]).is_err());
    }

    #[test]
    fn definitions_are_checked() {
        type Change = fn(&mut EncodingDef);
        let changes: [(Change, FaultIn, &str); 12] = [
            (|d| d.name = "f16".to_owned(), FaultIn::Name, "no element type"),
            (|d| d.scale = "dd".to_owned(), FaultIn::Scale, "did you mean `d`?"),
            (|d| d.scale = "d *".to_owned(), FaultIn::Scale, "expected"),
            (|d| d.minimum = Some("q".to_owned()), FaultIn::Minimum, "takes 1 index(es)"),
            (|d| d.code.value = "d".to_owned(), FaultIn::Code, "found a float of 4 bits"),
            (|d| d.code.bits = 0, FaultIn::Code, "1 to 16 bits"),
            (|d| d.when = Some("a ==".to_owned()), FaultIn::When, "expected"),
            (|d| d.tables = vec![("t".into(), vec![f64::NAN])], FaultIn::Name, "found NaN"),
            (|d| d.tables = vec![("n".into(), vec![1.0])], FaultIn::Name, "a name of its own"),
            (
                |d| d.stored = Stored::Blocks { values: 4, fields: vec![Default::default(); 65] },
                FaultIn::Name,
                "at most 64 stored parts, found 65",
            ),
            (
                |d| {
                    d.stored = Stored::Blocks { values: 4, fields: vec![("k".into(), "u8".into())] }
                },
                FaultIn::Part(0),
                "a name of its own",
            ),
            (
                |d| {
                    d.stored =
                        Stored::Blocks { values: 4, fields: vec![("d".into(), "f17".into())] }
                },
                FaultIn::Part(0),
                "expected an element type (u8, i8",
            ),
        ];
        for (change, of, expected) in changes {
            let mut def = blocks();
            change(&mut def);
            let fault = Encoding::new(def).expect_err(expected);
            assert_eq!(fault.of, of, "{fault}");
            assert!(fault.message.contains(expected), "{fault}");
        }
    }

    #[test]
    fn a_definition_survives_being_written() {
        let encoding = Encoding::new(squares()).expect("a definition");
        let other = Encoding::new(blocks()).expect("a definition");
        let again = Encoding::try_from(EncodingDef::from(encoding.clone())).expect("the same");
        assert_eq!(encoding, again);
        assert_ne!(encoding, other);
        assert!(other < encoding);
    }
}
