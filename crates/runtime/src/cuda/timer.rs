//! Time on the GPU.

use std::sync::Arc;
use std::time::Duration;

use super::driver::{Event, Gpu, Stream};
use crate::exec::GpuError;

/// Measures from its start to its stop; the host waits for what was launched in between.
pub(super) struct Timer(Event);

impl Timer {
    pub(super) fn start(gpu: &Arc<Gpu>, stream: &Stream) -> Result<Timer, GpuError> {
        let event = Event::new(gpu)?;
        stream.record(&event)?;
        Ok(Timer(event))
    }

    pub(super) fn stop(self, gpu: &Arc<Gpu>, stream: &Stream) -> Result<Duration, GpuError> {
        let end = Event::new(gpu)?;
        stream.record(&end)?;
        end.synchronize()?;
        Ok(Duration::from_secs_f64(f64::from(self.0.until(&end)?) / 1e3))
    }
}
