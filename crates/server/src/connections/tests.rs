use super::*;

fn gone(connection: &Connection) -> bool {
    !connection.table().places.contains_key(&connection.id)
}

fn open(all: &Arc<Connections>) -> Arc<Connection> {
    all.open().0
}

#[test]
fn the_oldest_idle_connection_makes_room() {
    let all = Connections::new(4);
    let [a, b, c, d] = std::array::from_fn(|_| open(&all));
    a.received();
    a.asked(false);
    b.received();
    // c has been idle longer than d; a is served, and then idle last.
    let e = open(&all);
    assert!(gone(&c) && !gone(&d) && !e.reserved);
    a.answered(0, true);
    assert_eq!(all.open().1, Some(Phase::New));
    assert!(gone(&d) && !gone(&a) && !gone(&b));
    let _kept = [open(&all), open(&all)];
    assert!(gone(&e) || gone(&a));
}

#[test]
fn senders_of_half_a_request_go_before_those_who_are_served() {
    let all = Connections::new(3);
    let [a, b, c] = std::array::from_fn(|_| open(&all));
    a.asked(false);
    b.received();
    b.asked(true);
    c.received();
    let d = open(&all);
    d.asked(false);
    assert!(gone(&b) && !gone(&c));
    let e = open(&all);
    e.asked(false);
    assert!(gone(&c) && !gone(&a));
    // All are served: whoever comes now is of the reserve.
    let f = open(&all);
    assert!(f.reserved && !gone(&a) && !gone(&d) && !gone(&e));
    // One that does not read is given a moment first.
    a.wrote(true);
    assert!(open(&all).reserved);
    assert!(lock(&all.table).make_room(Instant::now() + Duration::from_secs(2)).is_some());
    assert!(gone(&a));
}

#[test]
fn the_reserve_is_bounded_and_has_room() {
    let all = Connections::new(1);
    let first = open(&all);
    first.asked(false);
    let crowd: Vec<_> = (0..3 * RESERVE).map(|_| open(&all)).collect();
    assert!(crowd.iter().all(|c| c.reserved));
    assert_eq!(all.count(), 1 + RESERVE);
    assert!(!gone(&crowd[crowd.len() - 1]) && gone(&crowd[0]));
    drop(crowd);
    assert_eq!(all.count(), 1);
    drop(first);
    assert_eq!(all.count(), 0);
    assert!(!open(&all).reserved);
}

#[test]
fn each_phase_has_its_time() {
    let all = Connections::new(8);
    let [new, idle, head, body, answer, unread] = std::array::from_fn(|_| open(&all));
    for connection in [&idle, &answer, &unread] {
        connection.asked(false);
    }
    idle.answered(0, true);
    head.received();
    body.asked(true);
    unread.wrote(true);
    let swept = |seconds| {
        all.sweep(Instant::now() + Duration::from_secs(seconds));
        [&new, &idle, &head, &body, &answer, &unread].map(|c| gone(c))
    };
    assert_eq!(swept(5), [false; 6]);
    assert_eq!(swept(15), [true, false, true, false, false, false]);
    assert_eq!(swept(35), [true, false, true, false, false, true]);
    assert_eq!(swept(100), [true, true, true, false, false, true]);
    // What was ended is told, once, and comes back to nothing.
    new.received();
    assert!(gone(&new));
}

#[test]
fn reading_on_goes_on() {
    let all = Connections::new(1);
    let one = open(&all);
    one.asked(false);
    one.wrote(true);
    assert!(one.is(Phase::Unread));
    one.wrote(false);
    assert!(one.is(Phase::Answer));
    one.wrote(true);
    one.answered(0, true);
    assert!(one.is(Phase::Unread), "what is written last may not be read either");
    one.wrote(false);
    assert!(one.is(Phase::Idle));
}

#[test]
fn requests_of_one_connection_share_its_phase() {
    let all = Connections::new(8);
    let one = open(&all);
    one.received();
    one.multiplex();
    one.asked(true);
    one.asked(true);
    assert!(one.is(Phase::Body));
    one.read();
    assert!(one.is(Phase::Answer));
    one.read();
    one.answered(0, true);
    assert!(one.is(Phase::Answer));
    one.answered(1, true);
    one.received();
    assert!(one.is(Phase::Idle), "a frame is no request");
    assert_eq!(all.requests.load(Ordering::Relaxed), 0);
}

#[test]
fn what_is_offered_must_be_taken() {
    let all = Connections::new(8);
    let one = open(&all);
    one.multiplex();
    one.asked(false);
    one.asked(false);
    one.offers(7, true);
    one.offers(8, true);
    one.offers(8, false);
    let later = |seconds| Instant::now() + Duration::from_secs(seconds);
    all.sweep(later(5));
    assert!(!gone(&one));
    let ended = all.sweep(later(35));
    assert!(gone(&one) && ended.contains(&("unread", 1)));
}

#[test]
fn requests_that_are_taken_back_end_their_connection() {
    let all = Connections::new(8);
    let [flood, fair] = std::array::from_fn(|_| open(&all));
    for id in 0..1000 {
        for (connection, whole) in [(&flood, false), (&fair, id % 2 == 0)] {
            connection.asked(false);
            connection.answered(id, whole);
        }
        assert_eq!(gone(&flood), id >= 100, "{id}");
    }
    assert!(!gone(&fair));
    assert!(all.sweep(Instant::now()).contains(&("taken_back", 1)));
}

#[test]
fn a_connection_has_as_many_requests_as_are_free() {
    let all = Connections::new(12);
    let connections: [_; 3] = std::array::from_fn(|_| open(&all));
    let taken = connections.each_ref().map(|connection| {
        connection.multiplex();
        (0..100)
            .take_while(|_| {
                connection.asked(false);
                let crowded = connection.is_crowded();
                if crowded {
                    connection.answered(0, true);
                }
                !crowded
            })
            .count()
    });
    assert_eq!(taken, [6, 3, 1]);
}
