//! A scanner for the one JSON shape that a safetensors header has. It allocates nothing.

use super::MAX_RANK;
use super::error::{HeaderError, shown};

/// A JSON string as it stands between its quotes.
#[derive(Clone, Copy)]
pub(super) struct RawStr<'a> {
    pub(super) text: &'a str,
    /// Position in the header, in bytes.
    pub(super) start: usize,
    /// Whether `text` holds escapes.
    pub(super) escaped: bool,
}

/// One `"name": {"dtype", "shape", "data_offsets"}` item.
pub(super) struct RawTensor<'a> {
    pub(super) name: RawStr<'a>,
    pub(super) dtype: &'a str,
    pub(super) dims: [u64; MAX_RANK],
    pub(super) rank: usize,
    pub(super) data_offsets: (u64, u64),
}

/// Calls `visit` for each tensor of the header, in file order; skips `__metadata__`.
pub(super) fn header<'a>(
    json: &'a str,
    mut visit: impl FnMut(RawTensor<'a>) -> Result<(), HeaderError>,
) -> Result<(), HeaderError> {
    let mut s = Scanner { json, at: 0 };
    let mut metadata = false;
    s.object(|s, name| {
        if name.text != "__metadata__" {
            return visit(s.tensor(name)?);
        }
        if std::mem::replace(&mut metadata, true) {
            return Err(HeaderError::Duplicate { tensor: "__metadata__".into() });
        }
        if s.literal("null") {
            return Ok(());
        }
        s.object(|s, _| s.string("a string").map(|_| ()))
    })?;
    s.space();
    if s.at == json.len() { Ok(()) } else { Err(s.expected("the end of the header")) }
}

struct Scanner<'a> {
    json: &'a str,
    at: usize,
}

impl<'a> Scanner<'a> {
    fn peek(&self) -> Option<u8> {
        self.json.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    /// Skips white space, then takes `byte` if it is next.
    fn take(&mut self, byte: u8) -> bool {
        self.space();
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn literal(&mut self, word: &str) -> bool {
        self.space();
        let found = self.json[self.at..].starts_with(word);
        self.at += if found { word.len() } else { 0 };
        found
    }

    fn expected(&self, expected: &'static str) -> HeaderError {
        let found = match self.json.get(self.at..).and_then(|rest| rest.chars().next()) {
            Some(c) => format!("`{}`", c.escape_debug()),
            None => "the end of the header".into(),
        };
        HeaderError::Json { at: 8 + self.at, expected, found }
    }

    fn need(&mut self, byte: u8, expected: &'static str) -> Result<(), HeaderError> {
        if self.take(byte) { Ok(()) } else { Err(self.expected(expected)) }
    }

    /// `{"key": item, …}`; `item` reads one value.
    fn object(
        &mut self,
        mut item: impl FnMut(&mut Self, RawStr<'a>) -> Result<(), HeaderError>,
    ) -> Result<(), HeaderError> {
        self.need(b'{', "`{`")?;
        if self.take(b'}') {
            return Ok(());
        }
        loop {
            let key = self.string("a name in quotes")?;
            self.need(b':', "`:`")?;
            item(self, key)?;
            if self.take(b'}') {
                return Ok(());
            }
            self.need(b',', "`,` or `}`")?;
        }
    }

    /// `[1, 2, …]`; `item` takes each number.
    fn numbers(
        &mut self,
        mut item: impl FnMut(u64) -> Result<(), HeaderError>,
    ) -> Result<(), HeaderError> {
        self.need(b'[', "`[`")?;
        if self.take(b']') {
            return Ok(());
        }
        loop {
            item(self.number()?)?;
            if self.take(b']') {
                return Ok(());
            }
            self.need(b',', "`,` or `]`")?;
        }
    }

    /// A whole number of 64 bits, as JSON writes it: no sign, fraction, exponent or leading zero.
    fn number(&mut self) -> Result<u64, HeaderError> {
        const EXPECTED: &str = "a whole number below 2^64";
        self.space();
        let digits = self.json.as_bytes()[self.at..].iter().take_while(|b| b.is_ascii_digit());
        let text = &self.json[self.at..self.at + digits.count()];
        let padded = text.len() > 1 && text.starts_with('0');
        match text.parse() {
            Ok(value) if !padded => {
                self.at += text.len();
                Ok(value)
            }
            _ => Err(self.expected(EXPECTED)),
        }
    }

    fn string(&mut self, expected: &'static str) -> Result<RawStr<'a>, HeaderError> {
        self.need(b'"', expected)?;
        let start = self.at;
        let mut escaped = false;
        loop {
            match self.peek() {
                Some(b'"') => break,
                Some(b'\\') => {
                    escaped = true;
                    let rest = &self.json[self.at..];
                    let Some((_, used)) = escape(rest) else {
                        return Err(self.expected("a valid escape"));
                    };
                    self.at += used;
                }
                Some(0x20..) => self.at += 1,
                _ => return Err(self.expected("a closing quote")),
            }
        }
        self.at += 1;
        Ok(RawStr { text: &self.json[start..self.at - 1], start, escaped })
    }

    fn tensor(&mut self, name: RawStr<'a>) -> Result<RawTensor<'a>, HeaderError> {
        let tensor = || shown(name.text);
        let once = |seen: bool, field| {
            if seen { Err(HeaderError::DuplicateField { tensor: tensor(), field }) } else { Ok(()) }
        };
        let (mut dtype, mut rank, mut data_offsets) = (None, None, None);
        let mut dims = [0; MAX_RANK];
        self.object(|s, key| match key.text {
            "dtype" => {
                once(dtype.is_some(), "dtype")?;
                dtype = Some(s.string("a dtype in quotes")?.text);
                Ok(())
            }
            "shape" => {
                once(rank.is_some(), "shape")?;
                let mut count = 0;
                s.numbers(|n| {
                    let slot = dims.get_mut(count);
                    *slot.ok_or_else(|| HeaderError::TooManyDims { tensor: tensor() })? = n;
                    count += 1;
                    Ok(())
                })?;
                rank = Some(count);
                Ok(())
            }
            "data_offsets" => {
                once(data_offsets.is_some(), "data_offsets")?;
                data_offsets = Some(s.pair()?);
                Ok(())
            }
            other => Err(HeaderError::UnknownField { tensor: tensor(), field: shown(other) }),
        })?;
        let missing = |field| HeaderError::MissingField { tensor: tensor(), field };
        Ok(RawTensor {
            name,
            dtype: dtype.ok_or_else(|| missing("dtype"))?,
            dims,
            rank: rank.ok_or_else(|| missing("shape"))?,
            data_offsets: data_offsets.ok_or_else(|| missing("data_offsets"))?,
        })
    }

    fn pair(&mut self) -> Result<(u64, u64), HeaderError> {
        self.need(b'[', "`[`")?;
        let begin = self.number()?;
        self.need(b',', "`,`")?;
        let end = self.number()?;
        self.need(b']', "`]`")?;
        Ok((begin, end))
    }
}

/// The character that the escape at the start of `text` stands for, and the bytes it takes.
fn escape(text: &str) -> Option<(char, usize)> {
    let unit = |at: usize| -> Option<u32> {
        let hex = text.get(at..at + 6)?.strip_prefix("\\u")?;
        // `from_str_radix` alone would take a sign.
        if !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        u32::from_str_radix(hex, 16).ok()
    };
    let simple = match text.as_bytes().get(1)? {
        b'"' => '"',
        b'\\' => '\\',
        b'/' => '/',
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'u' => {
            let high = unit(0)?;
            if !(0xD800..0xDC00).contains(&high) {
                return Some((char::from_u32(high)?, 6));
            }
            let low = unit(6).filter(|low| (0xDC00..0xE000).contains(low))?;
            let code = 0x1_0000 + ((high - 0xD800) << 10) + (low - 0xDC00);
            return Some((char::from_u32(code)?, 12));
        }
        _ => return None,
    };
    Some((simple, 2))
}

/// Appends the text of a scanned string to `out`; never more bytes than `raw` has.
pub(super) fn unescape(raw: &str, out: &mut String) {
    let mut rest = raw;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        // The scanner accepted this string, so its escapes are valid.
        let Some((c, used)) = escape(&rest[at..]) else { return };
        out.push(c);
        rest = &rest[at + used..];
    }
    out.push_str(rest);
}
