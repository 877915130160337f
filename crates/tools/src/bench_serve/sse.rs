//! Server-sent events, as the WHATWG specification frames them, from bytes cut anywhere.

use super::error::Error;

/// Longest event that is taken; a server's events are a few hundred bytes.
const LONGEST: usize = 16 << 20;

/// The part of a stream that has not ended in an event yet.
#[derive(Default)]
pub(super) struct Events {
    /// A line that is not complete.
    line: Vec<u8>,
    /// The `data` lines of an event that is not complete, each ended by a newline.
    data: Vec<u8>,
}

impl Events {
    /// Reads bytes on, and hands over the data of every event that they complete.
    pub(super) fn read(
        &mut self,
        mut bytes: &[u8],
        mut event: impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        while let Some(end) = bytes.iter().position(|&b| b == b'\n') {
            let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
            bytes = rest;
            if self.line.is_empty() {
                line_of(line, &mut self.data, &mut event)?;
            } else {
                self.line.extend_from_slice(line);
                line_of(&self.line, &mut self.data, &mut event)?;
                self.line.clear();
            }
        }
        self.line.extend_from_slice(bytes);
        if self.line.len() + self.data.len() > LONGEST {
            return Err(Error::LongEvent { limit: LONGEST });
        }
        Ok(())
    }
}

/// Takes one line, without its newline. Fields other than `data`, and comments, are of no interest.
fn line_of(
    line: &[u8],
    data: &mut Vec<u8>,
    event: &mut impl FnMut(&[u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if let Some(value) = line.strip_prefix(b"data:") {
        data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
        data.push(b'\n');
    } else if line.is_empty() && !data.is_empty() {
        let told = event(&data[..data.len() - 1]);
        data.clear();
        return told;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn events(parts: &[&[u8]]) -> Vec<String> {
        let (mut events, mut found) = (Events::default(), Vec::new());
        for part in parts {
            let mut take = |data: &[u8]| {
                found.push(String::from_utf8_lossy(data).into_owned());
                Ok(())
            };
            events.read(part, &mut take).expect("short events");
        }
        found
    }

    #[test]
    fn fields_comments_and_line_ends_are_read_as_specified() {
        let stream = b": alive\n\ndata: a\n\ndata:b\r\n\r\nevent: x\nid: 1\ndata:  c\ndata: d\n\n\
            data\n\ndata: lost";
        assert_eq!(events(&[stream]), ["a", "b", " c\nd"]);
    }

    #[test]
    fn an_endless_event_is_refused() {
        let (mut events, part) = (Events::default(), vec![b'x'; 1 << 20]);
        let mut read = || events.read(&part, |_| Ok(()));
        let error = (0..20).find_map(|_| read().err()).expect("an error");
        assert!(error.to_string().contains("16777216 bytes"), "{error}");
    }

    proptest! {
        #[test]
        fn where_the_bytes_are_cut_makes_no_difference(
            texts in prop::collection::vec("[a-zé: ]{0,12}", 0..12),
            keep_alive in any::<bool>(),
            crlf in any::<bool>(),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..24),
        ) {
            let mut stream = Vec::new();
            let end = if crlf { "\r\n" } else { "\n" };
            for text in &texts {
                let comment = if keep_alive { format!(": keep-alive{end}{end}") } else { String::new() };
                stream.extend(format!("{comment}data: {text}{end}{end}").bytes());
            }
            let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(stream.len() + 1)).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let parts: Vec<&[u8]> = cuts.windows(2).map(|c| &stream[c[0]..c[1]]).collect();
            prop_assert_eq!(events(&parts), texts);
        }
    }
}
