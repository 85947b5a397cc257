----------------------------- MODULE Ownership -----------------------------
(* One thread and the runs that want it: the table of transitions, one       *)
(* transaction an action.  `net` holds writes that left their author and     *)
(* have not reached the store, so a slow or replaced worker writes at the    *)
(* worst moment.  No clock occurs here: what waits for time may happen at    *)
(* any time.  Adverse events cost fuel.  A switch that is FALSE breaks one   *)
(* rule; good configurations leave all of them TRUE.                         *)
EXTENDS Naturals, Sequences, FiniteSets, TLC
CONSTANTS
  Strat,        \* strategies of run 1, 2, ... in order of admission
  Kind,         \* "run" or "resv" (a reservation)
  Delayed,      \* runs that are admitted before they are due
  Slotless,     \* runs whose admitting worker has no free slot: vacant at once
  Policy,       \* on_orphan: "resume" or "fail"
  Sess, Stable, \* worker sessions; Stable never dies, crashes or drains
  NoOne,        \* owner null
  MaxAtt, MaxLog, Fuel,
  Adverse       \* which of suspect crash abort cancel replay handover grace may happen

CONSTANTS
  ByTurn,       \* O15 writes are ordered by turn; FALSE: by admission
  LooksQueue,   \* O1  an admission passes nobody who is due and waits
  FirstDue,     \* O7  promotion takes the oldest; FALSE: the newest
  Promotes,     \* O7  the ends that promote in their own transaction
  KeyFirst,     \* O5  a repeated admission is recognised before anything is displaced
  Vacant,       \* §3  resumed and handed-over runs keep the thread; FALSE: back to the queue
  VacateRaises, \* §3  becoming vacant raises the epoch
  HoldsNull,    \* O26 owner null is vacant; FALSE: counts as an orphan
  GivesBack,    \* O12 a worker gives back what it owns and does not hold
  Fence,        \* O14 writes are conditional on the epoch
  FenceEnds,    \* O14 so are settles; FALSE: by run id alone
  CancelCheck,  \* O20 a settle looks at the recorded cancel
  FirstWins,    \* O19 the first cancel action stays
  OwedRefuses,  \* §3  a settle is refused while a rollback is owed; FALSE: becomes interrupted
  Seizes,       \* O4  an owed run is seized; FALSE: ended, and the newcomer restores
  SelfSeizes,   \* O4  the owner too raises the epoch before it restores
  SeizeRaises,  \* O4  a seize raises the epoch
  BaseOnce,     \* O4  the base is what the first start found
  HeedsCancel   \* §3  take over leaves a cancelled run to force and seize

VARIABLES run, sess, loc, net, chain, nw, last, fuel, bad
vars == <<run, sess, loc, net, chain, nw, last, fuel, bad>>

Runs == 1..Len(Strat)
Act  == {"pending", "running"}
Term == {"success", "error", "interrupted", "rollback_failed", "refused", "gone"}
NoBase == 99
Blank == [st |-> "none", own |-> NoOne, ep |-> 0, att |-> 0, cx |-> "no",
          base |-> NoBase, turn |-> 0, due |-> TRUE]
Min(S) == CHOOSE x \in S : \A y \in S : x <= y
Max(S) == CHOOSE x \in S : \A y \in S : x >= y
Active == {r \in Runs : run[r].st \in Act}
Queued == {r \in Runs : run[r].st = "queued"}
Dead(o) == IF o = NoOne THEN ~HoldsNull ELSE sess[o] = "dead"
InChain(r) == \E i \in 1..Len(chain) : chain[i][1] = r
Progress(r) == \E i \in 1..Len(chain) : chain[i] = <<r, run[r].ep>>    \* progress_epoch = epoch
Owed(r) == run[r].cx = "rb" /\ run[r].base # NoBase
Cut(n) == SubSeq(chain, 1, IF n < Len(chain) THEN n ELSE Len(chain))
Spend(what) == what \in Adverse /\ fuel > 0 /\ fuel' = fuel - 1

\* loc[s]: what the process behind session s believes to hold: run, epoch, restored or not
Valid(m) == run[m[1]].ep = m[2] /\ run[m[1]].st \in Act
Has(s, r, e) == \E b \in BOOLEAN : <<r, e, b>> \in loc[s]
Holds(s, r, e) == Has(s, r, e) /\ run[r].ep = e /\ run[r].st \in Act
Drop(s, r, e) == loc' = [loc EXCEPT ![s] = {m \in @ : m[1] # r \/ m[2] # e}]

Init == /\ run = [r \in Runs |-> Blank] /\ sess = [s \in Sess |-> "live"] /\ loc = [s \in Sess |-> {}]
        /\ net = {} /\ chain = <<>> /\ nw = 0 /\ last = <<0, 0>> /\ fuel = Fuel /\ bad = {}
Quiet == UNCHANGED <<net, chain, nw, last, bad>>

\* ------------------------------------------------------------ ends and promotion (O7, O28)
Due(R) == {q \in Runs : R[q].st = "queued" /\ R[q].due}
Back(R) == {q \in Due(R) : R[q].ep > 0}                 \* resumed; only when ~Vacant
First(R) == IF Back(R) # {} THEN Min(Back(R)) ELSE IF FirstDue THEN Min(Due(R)) ELSE Max(Due(R))
Promoted(R) == [R EXCEPT ![First(R)].st = "pending", ![First(R)].own = NoOne]
EndOf(R, r, t) == [R EXCEPT ![r].st = t, ![r].own = NoOne, ![r].att = 0]
Close(R, r, t, by) == LET E == EndOf(R, r, t) IN IF by \in Promotes /\ Due(E) # {} THEN Promoted(E) ELSE E
Raised(R, r) == [R EXCEPT ![r].ep = @ + 1]
Vacated(r) == [run EXCEPT ![r].st = IF Vacant THEN "pending" ELSE "queued", ![r].own = NoOne,
                          ![r].ep = IF VacateRaises THEN @ + 1 ELSE @]
\* restores are counted apart from the attempts of the run, and nobody has tried one yet
Cancelled(R, r, a) == [R EXCEPT ![r].cx = a, ![r].att = IF a = "rb" THEN 0 ELSE @]
\* every sweep promotes an idle thread
Promote == /\ Active = {} /\ Due(run) # {} /\ run' = Promoted(run)
           /\ UNCHANGED <<sess, loc, fuel>> /\ Quiet
DueNow(r) == /\ run[r].st = "queued" /\ ~run[r].due /\ run' = [run EXCEPT ![r].due = TRUE]
             /\ UNCHANGED <<sess, loc, fuel>> /\ Quiet

\* ------------------------------------------------------------ sessions
Reap(s) == /\ sess[s] = "crashed" /\ sess' = [sess EXCEPT ![s] = "dead"]
           /\ UNCHANGED <<run, loc, fuel>> /\ Quiet
Suspect(s) == /\ s # Stable /\ sess[s] = "live" /\ Spend("suspect") /\ sess' = [sess EXCEPT ![s] = "dead"]
              /\ UNCHANGED <<run, loc>> /\ Quiet
Crash(s) == /\ s # Stable /\ sess[s] = "live" /\ (\E m \in loc[s] : Valid(m)) /\ Spend("crash")
            /\ loc' = [loc EXCEPT ![s] = {}] /\ sess' = [sess EXCEPT ![s] = "crashed"]
            /\ UNCHANGED run /\ Quiet
\* max_suspend passed, or a reply was lost for good: the process lives on without the run
Abort(s, r, e) == /\ Holds(s, r, e) /\ Spend("abort") /\ Drop(s, r, e) /\ UNCHANGED <<run, sess>> /\ Quiet

\* ------------------------------------------------------------ admission (O1, O2, O3)
Next1(r) == run[r].st = "none" /\ r = Min({x \in Runs : run[x].st = "none"})
Mine(R, s, r) == IF r \in Slotless
    THEN run' = [R EXCEPT ![r] = [Blank EXCEPT !.st = "pending"]] /\ UNCHANGED loc
    ELSE /\ run' = [R EXCEPT ![r] = [Blank EXCEPT !.st = "pending", !.own = s, !.ep = 1, !.att = 1]]
         /\ loc' = [loc EXCEPT ![s] = @ \cup {<<r, 1, FALSE>>}]
Waits(R, r) == LET Q == [R EXCEPT ![r] = [Blank EXCEPT !.st = "queued", !.due = r \notin Delayed]]
               IN run' = (IF LooksQueue /\ Active = {} /\ Due(Q) # {} THEN Promoted(Q) ELSE Q) /\ UNCHANGED loc
Refuse(r) == run' = [run EXCEPT ![r].st = "refused"] /\ UNCHANGED loc
FreeFor(r) == Active = {} /\ (LooksQueue => (IF Strat[r] = "enqueue" THEN Due(run) = {} ELSE Queued = {}))
\* interrupt and rollback: cancel what is active, end what waits
Displaced(r) == LET a == IF Strat[r] = "rollback" THEN "rb" ELSE "int" IN
    [x \in Runs |-> IF run[x].st = "queued" THEN [EndOf(run, x, "interrupted")[x] EXCEPT !.cx = IF @ = "no" THEN a ELSE @]
                    ELSE IF run[x].st \in Act /\ run[x].cx = "no" THEN Cancelled(run, x, a)[x] ELSE run[x]]
Submit(s, r) ==
    /\ sess[s] = "live" /\ Next1(r)
    /\ CASE r \in Delayed -> Waits(run, r)
         [] Kind[r] = "resv" \/ Strat[r] = "reject" -> IF FreeFor(r) THEN Mine(run, s, r) ELSE Refuse(r)
         [] Strat[r] = "enqueue" -> IF FreeFor(r) THEN Mine(run, s, r) ELSE Waits(run, r)
         [] OTHER -> IF \E x \in Active : Kind[x] = "resv" THEN Refuse(r)
                     ELSE IF Active = {} THEN Mine(Displaced(r), s, r) ELSE Waits(Displaced(r), r)
    /\ UNCHANGED <<sess, fuel>> /\ Quiet
\* the same admission again (a lost reply, an idempotency key): must change nothing
Replay(r) == /\ run[r].st \notin {"none", "refused"} /\ Strat[r] \in {"interrupt", "rollback"} /\ Spend("replay")
             /\ run' = (IF KeyFirst THEN run ELSE Displaced(r))
             /\ bad' = bad \cup (IF run' # run THEN {"replay"} ELSE {})
             /\ UNCHANGED <<sess, loc, net, chain, nw, last>>

\* ------------------------------------------------------------ life of a run
Claim(s, r) == /\ sess[s] = "live" /\ run[r].st = "pending" /\ run[r].own = NoOne /\ run[r].cx = "no"
               /\ run' = [run EXCEPT ![r].own = s, ![r].ep = @ + 1, ![r].att = IF @ = 0 THEN 1 ELSE @]
               /\ loc' = [loc EXCEPT ![s] = @ \cup {<<r, run[r].ep + 1, FALSE>>}]
               /\ UNCHANGED <<sess, fuel>> /\ Quiet
NextTurn == 1 + Max({run[x].turn : x \in Runs})
\* what a newcomer still has to restore when ~Seizes
Left == {x \in Runs : run[x].st = "interrupted" /\ run[x].cx = "rb" /\ InChain(x)}
Start(s, r, e) ==
    /\ Holds(s, r, e) /\ run[r].st = "pending" /\ run[r].cx = "no" /\ Kind[r] = "run"
    /\ LET c == IF ~Seizes /\ Strat[r] = "rollback" /\ Left # {} THEN Cut(Min({run[x].base : x \in Left})) ELSE chain IN
       /\ chain' = c
       /\ run' = [run EXCEPT ![r].st = "running", ![r].turn = IF @ = 0 THEN NextTurn ELSE @,
                             ![r].base = IF @ = NoBase \/ ~BaseOnce THEN Len(c) ELSE @]
    /\ UNCHANGED <<sess, loc, net, nw, last, fuel, bad>>
\* A late write is one that was sent in time and travelled long, so with the fence only holders send;
\* likewise what would be sent after a recorded rollback was sent before it.
Send(s, r, e) == /\ Has(s, r, e) /\ Kind[r] = "run" /\ nw + Cardinality(net) < MaxLog
                 /\ IF run[r].ep = e THEN run[r].st = "running" /\ (run[r].cx # "rb" \/ ~SelfSeizes) ELSE ~Fence
                 /\ net' = net \cup {<<r, e>>} /\ UNCHANGED <<run, sess, loc, chain, nw, last, fuel, bad>>
Key(r) == IF ByTurn THEN run[r].turn ELSE r
Deliver(m) ==
    LET r == m[1] e == m[2] ok == run[r].ep = e /\ run[r].st \in Act
        back == last[1] > Key(r) \/ (last[1] = Key(r) /\ last[2] > e) IN
    /\ net' = net \ {m} /\ UNCHANGED <<run, sess, fuel>>
    /\ IF ok \/ ~Fence
       THEN /\ chain' = Append(chain, m) /\ nw' = nw + 1 /\ last' = <<Key(r), e>> /\ UNCHANGED loc
            /\ bad' = bad \cup (IF ok THEN {} ELSE {"stale"}) \cup (IF back THEN {"order"} ELSE {})
       ELSE loc' = [s \in Sess |-> {h \in loc[s] : h[1] # r \/ h[2] # e}] /\ UNCHANGED <<chain, nw, last, bad>>
Settle(s, r, e) ==
    /\ Has(s, r, e) /\ Kind[r] = "run" /\ (Owed(r) => ~OwedRefuses)
    /\ (IF FenceEnds THEN run[r].st = "running" /\ run[r].ep = e ELSE run[r].st \in {"running", "interrupted", "error"})
    /\ run' = Close(run, r, IF run[r].cx # "no" /\ CancelCheck THEN "interrupted" ELSE "success", "settle")
    /\ bad' = bad \cup (IF run[r].ep = e THEN {} ELSE {"stale"})
    /\ Drop(s, r, e) /\ UNCHANGED <<sess, fuel, net, chain, nw, last>>
\* could not even start; an error after the start differs from success in nothing that is checked here
SettleError(s, r, e) ==
    /\ Holds(s, r, e) /\ Kind[r] = "run" /\ run[r].st = "pending" /\ run[r].cx = "no"
    /\ run' = Close(run, r, "error", "settle") /\ Drop(s, r, e) /\ UNCHANGED <<sess, fuel>> /\ Quiet
SettleCancelled(s, r, e) ==
    /\ Holds(s, r, e) /\ run[r].cx # "no" /\ Kind[r] = "run"
    /\ (Owed(r) => <<r, e, TRUE>> \in loc[s] /\ (SelfSeizes => run[r].st = "pending"))
    /\ run' = Close(run, r, "interrupted", "settle") /\ Drop(s, r, e) /\ UNCHANGED <<sess, fuel>> /\ Quiet
Release(s, r, e) ==
    /\ Holds(s, r, e) /\ Kind[r] = "resv" /\ run' = Close(run, r, "gone", "release")
    /\ Drop(s, r, e) /\ UNCHANGED <<sess, fuel>> /\ Quiet
HandOver(s, r, e) ==
    /\ Holds(s, r, e) /\ s # Stable /\ Kind[r] = "run" /\ run[r].cx = "no" /\ Spend("handover")
    /\ run' = Vacated(r)
    /\ Drop(s, r, e) /\ UNCHANGED sess /\ Quiet

\* ------------------------------------------------------------ cancel, force, seize, restore (O4)
Cancel(r, a) == /\ Kind[r] = "run" /\ run[r].st \in Act \cup {"queued"} /\ Spend("cancel")
                /\ (IF FirstWins THEN run[r].cx = "no" ELSE run[r].cx # a)
                /\ LET R == Cancelled(run, r, a) IN
                   run' = IF run[r].st = "queued" THEN EndOf(R, r, "interrupted") ELSE R
                /\ UNCHANGED <<sess, loc>> /\ Quiet
Force(r) == /\ run[r].st \in Act /\ run[r].cx # "no" /\ Kind[r] = "run" /\ (Owed(r) => ~Seizes)
            /\ run' = Raised(Close(run, r, "interrupted", "force"), r)
            /\ UNCHANGED <<sess, loc, fuel>> /\ Quiet
\* The owner seizes once its task has stopped, or when it does not hold the run; a live other's only past the grace.
Seize(s, r) ==
    /\ sess[s] = "live" /\ run[r].st \in Act /\ Kind[r] = "run" /\ Owed(r)
    /\ LET o == run[r].own  e == run[r].ep  n == IF SeizeRaises THEN e + 1 ELSE e IN
       /\ \/ o = s /\ (IF SelfSeizes THEN run[r].st = "running" \/ ~Has(s, r, e) ELSE ~Has(s, r, e)) /\ UNCHANGED fuel
          \/ Seizes /\ o # s /\ (o = NoOne \/ Dead(o)) /\ UNCHANGED fuel
          \/ Seizes /\ o \notin {s, NoOne} /\ ~Dead(o) /\ Spend("grace")
       /\ run' = [run EXCEPT ![r].st = "pending", ![r].own = s, ![r].ep = n,
                             ![r].att = IF o = s /\ @ > 0 THEN @ ELSE @ + 1]
       /\ loc' = [loc EXCEPT ![s] = {m \in @ : m[1] # r \/ m[2] # e} \cup {<<r, n, FALSE>>}]
    /\ UNCHANGED sess /\ Quiet
\* a fenced write like any other
Restore(s, r, e) ==
    /\ <<r, e, FALSE>> \in loc[s] /\ Kind[r] = "run" /\ Owed(r) /\ Holds(s, r, e)
    /\ (SelfSeizes => run[r].st = "pending") /\ run[r].att <= MaxAtt
    /\ chain' = Cut(run[r].base)
    /\ loc' = [loc EXCEPT ![s] = (@ \ {<<r, e, FALSE>>}) \cup {<<r, e, TRUE>>}]
    /\ bad' = bad \cup (IF \E i \in 1..Len(chain) : i > run[r].base /\ chain[i][1] # r THEN {"cut"} ELSE {})
    /\ UNCHANGED <<run, sess, net, nw, last, fuel>>
RollbackFailed(s, r, e) ==
    /\ Holds(s, r, e) /\ Owed(r) /\ run[r].st = "pending" /\ run[r].att > MaxAtt
    /\ run' = Close(run, r, "rollback_failed", "settle") /\ Drop(s, r, e) /\ UNCHANGED <<sess, fuel>> /\ Quiet

\* ------------------------------------------------------------ recovery (O26, O30)
\* resume or fail what its owner lost; `seen` FALSE marks a run that nobody was ever given
Recovered(r, by) ==
    LET t == IF Kind[r] = "resv" THEN "gone" ELSE "error"
        n == IF Progress(r) THEN 1 ELSE run[r].att + 1 IN
    IF Kind[r] = "resv" \/ Policy = "fail" \/ n > MaxAtt
    THEN /\ run' = Raised(Close(run, r, t, by), r)
         /\ bad' = bad \cup (IF run[r].own = NoOne THEN {"unseen"} ELSE {}) \cup (IF Owed(r) THEN {"owed"} ELSE {})
    ELSE /\ run' = [Vacated(r) EXCEPT ![r].att = n]
         /\ UNCHANGED bad
TakeOver(r) == /\ run[r].st \in Act /\ Dead(run[r].own) /\ (run[r].cx # "no" => ~HeedsCancel)
               /\ Recovered(r, "takeover") /\ UNCHANGED <<sess, loc, fuel, net, chain, nw, last>>
GiveBack(s, r) == /\ GivesBack /\ sess[s] = "live" /\ run[r].st \in Act /\ run[r].own = s /\ run[r].cx = "no"
                  /\ ~Has(s, r, run[r].ep)
                  /\ Recovered(r, "takeover") /\ UNCHANGED <<sess, loc, fuel, net, chain, nw, last>>
TakeBack(s, new, r, e) ==
    /\ Holds(s, r, e) /\ sess[s] = "dead" /\ sess[new] = "live" /\ run[r].own = s
    /\ run' = [run EXCEPT ![r].own = new, ![r].ep = @ + 1]
    /\ loc' = [loc EXCEPT ![s] = {m \in @ : m[1] # r \/ m[2] # e}, ![new] = @ \cup {<<r, e + 1, FALSE>>}]
    /\ UNCHANGED <<sess, fuel>> /\ Quiet

Next == \/ \E s \in Sess : Reap(s) \/ Suspect(s) \/ Crash(s)
        \/ \E s \in Sess, r \in Runs : Submit(s, r) \/ Claim(s, r) \/ Seize(s, r) \/ GiveBack(s, r)
        \/ \E s \in Sess : \E m \in loc[s] : LET r == m[1] e == m[2] IN
             \/ Abort(s, r, e) \/ Start(s, r, e) \/ Send(s, r, e) \/ Settle(s, r, e) \/ SettleError(s, r, e)
             \/ SettleCancelled(s, r, e) \/ Restore(s, r, e) \/ RollbackFailed(s, r, e) \/ Release(s, r, e)
             \/ HandOver(s, r, e) \/ \E new \in Sess : TakeBack(s, new, r, e)
        \/ \E m \in net : Deliver(m)
        \/ \E r \in Runs : Force(r) \/ TakeOver(r) \/ DueNow(r) \/ Replay(r) \/ Cancel(r, "int") \/ Cancel(r, "rb")
        \/ Promote

Safe == Init /\ [][Next]_vars
\* the same without a rollback that a user asked for: only newcomers ask
OnlyNewcomers == \A r \in Runs : (run[r].cx = "no" /\ run'[r].cx = "rb") => \E x \in Runs : run[x].st = "none" /\ run'[x].st # "none"
SafeNoUserRollback == Init /\ [][Next /\ OnlyNewcomers]_vars

\* one worker stays healthy and does what every worker does; nothing is asked of a session that is not live
Work(s, r, e) == \/ Start(s, r, e) \/ Settle(s, r, e) \/ Restore(s, r, e) \/ SettleCancelled(s, r, e)
                 \/ RollbackFailed(s, r, e) \/ Release(s, r, e)
Fair(sweeps) ==
    /\ \A s \in Sess : WF_vars(Reap(s))
    /\ \A r \in Runs : WF_vars(Claim(Stable, r)) /\ WF_vars(DueNow(r))
    /\ \A s \in Sess, r \in Runs : /\ WF_vars(sess[s] = "live" /\ \E m \in loc[s] : m[1] = r /\ Work(s, r, m[2]))
                                   /\ WF_vars(run[r].own = s /\ Seize(s, r)) /\ WF_vars(GiveBack(s, r))
    /\ "promote" \in sweeps => WF_vars(Promote)
    /\ "takeover" \in sweeps => \A r \in Runs : WF_vars(TakeOver(r))
    /\ "force" \in sweeps => \A r \in Runs : WF_vars(Force(r))
    /\ "seize" \in sweeps => \A r \in Runs : WF_vars(Seize(Stable, r))
Live == Safe /\ Fair({"promote", "takeover", "force", "seize"})
LiveNoPromote  == Safe /\ Fair({"takeover", "force", "seize"})
LiveNoTakeOver == Safe /\ Fair({"promote", "force", "seize"})
LiveNoForce    == Safe /\ Fair({"promote", "takeover", "seize"})
LiveNoSeize    == Safe /\ Fair({"promote", "takeover", "force"})

\* With the fence a holding whose epoch is over can do nothing any more: states that differ in such holdings are one.
Seen == <<run, sess, [s \in Sess |-> {m \in loc[s] : Valid(m)}], net, chain, nw, last, fuel, bad>>
Mortals == Permutations(Sess \ {Stable})

\* ------------------------------------------------------------ what must hold
I1 == Cardinality(Active) <= 1
I2 == "stale" \notin bad
I3 == "order" \notin bad
I4 == \A s, t \in Sess : s # t => \A m \in loc[s], n \in loc[t] : m[1] # n[1] \/ m[2] # n[2]
I4Owner == \A s \in Sess : \A m \in loc[s] : Valid(m) => run[m[1]].own = s
I4Grows == [][\A r \in Runs : run'[r].ep >= run[r].ep]_vars
I5 == [][\A r \in Runs : run[r].st \in Term => run'[r].st = run[r].st]_vars
I6 == \A r \in Runs : run[r].st = "success" => run[r].cx = "no"
I6First == [][\A r \in Runs : run[r].cx # "no" => run'[r].cx = run[r].cx]_vars
I7 == Due(run) \ Delayed # {} => Active # {}
I8 == \A r \in Runs : (run[r].st \in Act \cup {"queued"}) ~> (run[r].st \in Term)
\* once a rollback is owed only restores count, see Attempts.tla
I9 == \A r \in Runs : Owed(r) \/ run[r].att <= MaxAtt
I14 == "replay" \notin bad
\* a restore removes nothing of another run
I16Only == "cut" \notin bad
\* nothing is left of a run that was rolled back ...
I16Gone == \A r \in Runs : (run[r].st = "interrupted" /\ run[r].cx = "rb" /\ InChain(r)) =>
             (~Seizes /\ \E x \in Runs : x # r /\ Strat[x] = "rollback" /\ run[x].st \in {"queued", "pending"} /\ run[x].cx = "no")
\* ... nobody runs on top of it ...
I16Clean == \A r, x \in Runs : (run[x].st = "running" /\ x # r /\ run[r].st = "interrupted" /\ run[r].cx = "rb") => ~InChain(r)
\* ... and no run ends otherwise while its rollback is owed
I16Owed == "owed" \notin bad /\ \A r \in Runs : run[r].st \in {"success", "error"} => ~Owed(r)
\* of two that wait and are due the older becomes active first, and so starts first
I17 == \A r, x \in Runs : (r < x /\ r \notin Delayed) =>
         /\ (run[r].st = "queued" /\ run[r].ep = 0) => (run[x].st \notin Act /\ run[x].turn = 0)
         /\ (x \notin Delayed /\ run[r].turn > 0 /\ run[x].turn > 0) => run[r].turn < run[x].turn
\* nobody becomes active at admission while an older run is due and waits (unless it displaced it)
I17NoOvertake == [][\A r, x \in Runs : (run[r].st = "queued" /\ run[r].due /\ run[x].st = "none" /\ run'[x].st = "pending")
                      => run'[r].st # "queued"]_vars
\* take over ends only what somebody was given
OnlyOrphansFail == "unseen" \notin bad
=============================================================================
