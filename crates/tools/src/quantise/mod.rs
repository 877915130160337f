//! `infernum quantise`.

mod folder;
mod gguf;
mod importance;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;

use infernum::ModelOptions;
use infernum_frontend_hf::gguf::weights;
use infernum_frontend_hf::{LowerOptions, Model, TensorView};
use infernum_ir::encoding::Element;
use infernum_ir::{Encoding, Sym};
use infernum_passes::data::Kernels;

use self::importance::Importance;
use crate::report::{self, Outcome};

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Encoding of the layers' matrices: a name of `infernum encodings`; for GGUF files also f32, f16 or bf16.
    #[arg(long, value_name = "NAME")]
    to: String,
    /// Folder to write; or a GGUF file, if its name ends in `.gguf`.
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// Weights to leave as they are, `*` standing for any text, as `*.gate.weight` of routers; may be given often.
    #[arg(long, value_name = "PATTERN")]
    skip: Vec<String>,
    /// A text, UTF-8, which the model reads first: errors of a weight count by the size of what it is multiplied with there.
    #[arg(long, value_name = "FILE")]
    importance: Option<PathBuf>,
    #[command(flatten)]
    model: ModelOptions,
}

/// How matrices are stored.
enum Target<'a> {
    Encoded(&'a Encoding),
    Plain(Element),
}

/// Writes the model with its layers' matrices encoded; everything else is as it was.
pub fn run(args: &Args) -> Outcome {
    let model = args.model.open_with_progress(&report::progress())?;
    let kernels = Kernels::load(args.model.data.as_deref(), &[])?;
    let is_file = args.out.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    let plain =
        [Element::F32, Element::F16, Element::Bf16].into_iter().find(|e| e.name() == args.to);
    let target = match (kernels.ops.encoding(&args.to), plain.filter(|_| is_file)) {
        (Some(encoding), _) => Target::Encoded(encoding),
        (None, Some(element)) => Target::Plain(element),
        (None, None) => {
            let hint = infernum_ir::nearest(&args.to, kernels.ops.encodings().map(Encoding::name));
            return Err(format!(
                "--to: no encoding is named `{}`{hint}; `infernum encodings` lists them",
                args.to
            )
            .into());
        }
    };
    if model.config.value("quantization_config").is_some() {
        return Err("--model: expected a checkpoint of plain floats, or a GGUF file".into());
    }
    let importance = match (&args.importance, &target) {
        (Some(path), Target::Encoded(_)) => Importance::gather(path, &model, &args.model)?,
        (Some(_), Target::Plain(_)) => {
            return Err("--importance: expected an encoding in --to".into());
        }
        (None, _) => Importance::default(),
    };
    let done = match target {
        target if is_file => gguf::run(args, &model, &kernels, &target, &importance),
        Target::Encoded(encoding) => folder::run(args, &model, encoding, &importance),
        Target::Plain(_) => Err("--to: expected an encoding".into()),
    };
    importance.notice().iter().for_each(|text| report::notice(text));
    done
}

/// The matrices of layers that may be encoded, by what the model's files call them: rows and columns.
fn matrices<'e>(
    model: &Model,
    known: impl IntoIterator<Item = &'e Encoding>,
    skip: &[String],
    fits: impl Fn(&str, u64, u64) -> bool,
) -> Result<BTreeMap<String, (u64, u64)>, Box<dyn Error>> {
    let options = LowerOptions { dtype: None, max_length: None, rows: Sym::B };
    let module = model.lower(options, known)?.module;
    let mut all = BTreeMap::new();
    for site in module.schedule.iter().filter(|s| s.layer.is_some()) {
        for (name, shape, turned) in weights(&module.graphs[site.graph], *site) {
            let [rows, columns] = shape[..] else { continue };
            // Encoded ones are as products read them.
            let is_matrix = !turned && rows > 1 && columns > 1;
            if is_matrix && !is_left(skip, &name) && fits(&name, rows, columns) {
                all.insert(name, (rows, columns));
            }
        }
    }
    Ok(all)
}

fn is_left(skip: &[String], name: &str) -> bool {
    skip.iter().any(|pattern| infernum_frontend_hf::matches(pattern, name))
}

/// The values of a tensor of floats.
fn values(tensor: &TensorView<'_>) -> Result<Vec<f32>, String> {
    let element = tensor.dtype.element().filter(|e| !e.is_whole() && tensor.blocks.is_none());
    let element =
        element.ok_or_else(|| format!("expected floats, found {}", tensor.stored_as()))?;
    let elements = tensor.data.chunks_exact(element.size() as usize);
    Ok(elements.map(|x| element.read(x).float()).collect())
}

/// What is lost of values.
#[derive(Clone, Copy, Default)]
struct Loss {
    /// Squared differences.
    error: f64,
    /// Squared values.
    whole: f64,
}

impl Loss {
    /// Of a matrix and what it was encoded to.
    fn of(
        encoding: &Encoding,
        (rows, columns): (u64, u64),
        values: &[f32],
        bytes: &[Vec<u8>],
    ) -> Result<Loss, String> {
        let parts = bytes.iter().map(|b| &b[..]).collect();
        let decoder = encoding.decoder(rows, columns, parts)?;
        let (mut row, mut loss) = (vec![0.0; columns as usize], Loss::default());
        for (n, values) in values.chunks_exact(columns as usize).enumerate() {
            decoder.row(n as u64, 0, &mut row);
            let differences = row.iter().zip(values).map(|(a, b)| f64::from(a - b).powi(2));
            loss.error += differences.sum::<f64>();
            loss.whole += values.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>();
        }
        Ok(loss)
    }

    fn and(self, other: Loss) -> Loss {
        Loss { error: self.error + other.error, whole: self.whole + other.whole }
    }

    fn relative(self) -> f64 {
        self.error / self.whole.max(f64::MIN_POSITIVE)
    }
}

/// What was written, for the last line.
struct Written {
    /// Of each matrix.
    losses: Vec<(String, Loss)>,
    /// Bytes of the matrices before and after.
    plain: usize,
    coded: usize,
}

impl Written {
    fn report(&self, args: &Args) -> Outcome {
        let worst = self.losses.iter().map(|(n, l)| (n, l.relative()));
        let worst = worst.max_by(|a, b| a.1.total_cmp(&b.1)).filter(|w| w.1 > 0.0);
        let worst = worst.map_or_else(String::new, |(n, e)| format!("; worst: {n} {e:.2e}"));
        let mean = self.losses.iter().map(|(_, l)| l.relative()).sum::<f64>();
        report::line(&format!(
            "{}: {} matrices as {}, {} bytes become {}; relative squared error {:.2e}{worst}",
            args.out.display(),
            self.losses.len(),
            args.to,
            self.plain,
            self.coded,
            mean / self.losses.len().max(1) as f64,
        ))
    }
}

/// Does work on all cores: the results by their places, or the first error.
fn on_all_cores<T: Send>(
    count: usize,
    work: impl Fn(usize) -> Result<T, String> + Sync,
) -> Result<Vec<T>, String> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let some = || -> Result<Vec<(usize, T)>, String> {
        let mut done = Vec::new();
        loop {
            let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if i >= count {
                return Ok(done);
            }
            done.push((i, work(i)?));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(count);
    let all: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        running.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    let mut done = Vec::with_capacity(count);
    for part in all {
        done.extend(part.map_err(|_| "a thread that encodes has panicked")??);
    }
    done.sort_by_key(|(i, _)| *i);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}
