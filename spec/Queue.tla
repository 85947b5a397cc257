-------------------------------- MODULE Queue --------------------------------
(* Admission and settling as statements and transactions under read          *)
(* committed: a statement sees the rows as they were when it began, waits    *)
(* for the row locks of others, and looks again only at the row it waited    *)
(* for.  Run 1 is active; the others arrive by their strategy; a sweeper     *)
(* promotes.  Rules O1, O2, O3, O7.  (On SQLite each of these is one         *)
(* transaction that excludes all others: that is Ownership.tla.)             *)
EXTENDS Naturals, Sequences, FiniteSets, TLC
CONSTANTS
  Strat,        \* of runs 1, 2, ...: enqueue, interrupt, reject, or delayed (and now due); that of run 1 is not used
  Index,        \* I1 unique (thread) where active
  ReadsFlag,    \* O7 the fast settle asks for NOT queue_behind
  FlagsWithin,  \* O2 flag and insert are one statement
  FlagsNext,    \* §3 promote sets queue_behind
  ThenPromotes, \* O7 promotion is a later statement than the settle; FALSE: the same
  LooksAgain,   \* O3 what waits is looked up in a later statement than the cancel; FALSE: in the same
  ThreadLock,   \* O7 taken by every transaction that changes several runs
  Restarts      \* O3 an insert that found the slot taken starts again
VARIABLES row, tx, lock, pc, snap, drawn, bad
vars == <<row, tx, lock, pc, snap, drawn, bad>>
Runs == 1..Len(Strat)
Sweeper == 0
Procs == Runs \cup {Sweeper}
Blank == [st |-> "none", flag |-> FALSE, cx |-> FALSE, seq |-> 0]
Nothing == [r \in {} |-> Blank]
Init == /\ row = [r \in Runs |-> IF r = 1 THEN [Blank EXCEPT !.st = "active", !.seq = 1] ELSE Blank]
        /\ tx = [p \in Procs |-> Nothing] /\ lock = {} /\ drawn = 1 /\ bad = {}
        /\ pc = [p \in Procs |-> IF p = Sweeper THEN "idle" ELSE IF p = 1 THEN "in" ELSE "come"]
        /\ snap = [p \in Procs |-> Nothing]

\* ---- what a transaction sees, waits for and leaves
Sees(p) == tx[p] @@ row
Theirs(p, r) == \E q \in Procs \ {p} : r \in DOMAIN tx[q]
With(R, s) == {r \in DOMAIN R : R[r].st = s}
\* the unique index waits for whoever is about to make or end an active row
IndexWaits(p) == \E q \in Procs \ {p} : \E r \in DOMAIN tx[q] : tx[q][r].st = "active" \/ row[r].st = "active"
Taken(p) == Index /\ With(Sees(p), "active") # {}
Oldest(R) == CHOOSE r \in With(R, "queued") : \A q \in With(R, "queued") : R[r].seq <= R[q].seq
Go(p, to) == pc' = [pc EXCEPT ![p] = to]
Begin(p, to) == snap' = [snap EXCEPT ![p] = Sees(p)] /\ Go(p, to)
Forget(p) == snap' = [snap EXCEPT ![p] = Nothing]
Change(p, R) == tx' = [tx EXCEPT ![p] = R @@ @]
New(s) == [Blank EXCEPT !.st = s, !.seq = drawn + 1]
Locked(p, from, to) == /\ pc[p] = from /\ Go(p, to)
                       /\ IF ThreadLock THEN lock = {} /\ lock' = {p} ELSE UNCHANGED lock
                       /\ UNCHANGED <<row, tx, snap, drawn, bad>>
Commit(p, from, to) == /\ pc[p] = from /\ Go(p, to) /\ row' = Sees(p) /\ lock' = lock \ {p}
                       /\ tx' = [tx EXCEPT ![p] = Nothing] /\ UNCHANGED <<snap, drawn, bad>>
View(p, from, to) == pc[p] = from /\ Begin(p, to) /\ UNCHANGED <<row, tx, lock, drawn, bad>>

\* ---- promotion, a statement: it locks the head of the queue, then makes it active
Heads(p) == IF With(snap[p], "queued") = {} \/ With(snap[p], "active") # {} THEN {} ELSE {Oldest(snap[p])}
LockHead(p, from, via, to) ==
    /\ pc[p] = from /\ UNCHANGED <<row, lock, drawn, bad>>
    /\ IF Heads(p) = {} THEN Forget(p) /\ Go(p, to) /\ UNCHANGED tx
       ELSE \E h \in Heads(p) :
            /\ ~Theirs(p, h)
            /\ IF row[h].st # "queued" THEN Forget(p) /\ Go(p, to) /\ UNCHANGED tx
               ELSE Change(p, h :> row[h]) /\ Go(p, via) /\ UNCHANGED snap
\* A sweep may find the slot taken by somebody whose statement began before the head was there, or due: then the
\* index refuses it, and it promotes nobody.  In a settle that would undo the settle; there it must not happen.
Raise(p, via, to) ==
    /\ pc[p] = via /\ ~IndexWaits(p) /\ Forget(p) /\ Go(p, to) /\ UNCHANGED <<row, lock, drawn>>
    /\ IF Taken(p) THEN tx' = [tx EXCEPT ![p] = Nothing] /\ bad' = bad \cup (IF via = "next head" THEN {"undone"} ELSE {})
       ELSE /\ \E h \in Heads(p) : Change(p, h :> [row[h] EXCEPT !.st = "active", !.flag = FlagsNext])
            /\ UNCHANGED bad
Promote(p, from, via, to) == LockHead(p, from, via, to) \/ Raise(p, via, to)
Sweep == /\ pc[Sweeper] = "idle" /\ With(row, "active") = {} /\ With(row, "queued") # {} /\ Go(Sweeper, "promote")
         /\ UNCHANGED <<row, tx, lock, snap, drawn, bad>>
After(p) == IF p = Sweeper THEN "idle" ELSE "come"
Promotes(p) == \/ Locked(p, "promote", "promote view") \/ View(p, "promote view", "promote do")
               \/ Promote(p, "promote do", "promote head", "promote end") \/ Commit(p, "promote end", After(p))

\* ---- delayed, reject and enqueue
Delayed(r) == /\ pc[r] = "come" /\ Strat[r] = "delayed" /\ row' = [row EXCEPT ![r] = New("queued")] /\ drawn' = drawn + 1
              /\ Go(r, "in") /\ UNCHANGED <<tx, lock, snap, bad>>
Come(r) == /\ pc[r] = "come" /\ Strat[r] \in {"reject", "enqueue"} /\ Begin(r, "enter") /\ UNCHANGED <<row, tx, lock, drawn, bad>>
Enter(r) ==
    /\ pc[r] = "enter" /\ Forget(r) /\ UNCHANGED <<tx, lock, bad>>
    /\ IF With(snap[r], "queued") # {}
       THEN Go(r, "behind") /\ UNCHANGED <<row, drawn>>
       ELSE /\ (Index => ~IndexWaits(r))
            /\ IF Taken(r) THEN Go(r, "behind") /\ UNCHANGED <<row, drawn>>
               ELSE row' = [row EXCEPT ![r] = New("active")] /\ drawn' = drawn + 1 /\ Go(r, "in")
Behind(r) == /\ pc[r] = "behind"
             /\ IF Strat[r] = "reject" THEN Go(r, "refused") /\ UNCHANGED snap ELSE Begin(r, "flag")
             /\ UNCHANGED <<row, tx, lock, drawn, bad>>
\* flags the incumbent and inserts from it; if the settle was faster: promote and start again
Flag(r) ==
    /\ pc[r] = "flag" /\ Forget(r) /\ UNCHANGED <<tx, lock, bad>>
    /\ IF With(snap[r], "active") = {} THEN Go(r, "promote") /\ UNCHANGED <<row, drawn>>
       ELSE \E t \in With(snap[r], "active") :
            /\ ~Theirs(r, t)
            /\ IF row[t].st # "active" THEN Go(r, "promote") /\ UNCHANGED <<row, drawn>>
               ELSE IF FlagsWithin
               THEN row' = [row EXCEPT ![t].flag = TRUE, ![r] = New("queued")] /\ drawn' = drawn + 1 /\ Go(r, "in")
               ELSE row' = [row EXCEPT ![t].flag = TRUE] /\ UNCHANGED drawn /\ Go(r, "join")
Join(r) == /\ pc[r] = "join" /\ row' = [row EXCEPT ![r] = New("queued")] /\ drawn' = drawn + 1 /\ Go(r, "in")
           /\ UNCHANGED <<tx, lock, snap, bad>>

\* ---- interrupt
Arrive(r) == pc[r] = "come" /\ Strat[r] = "interrupt" /\ Locked(r, "come", "cancel view")
CancelActive(r) ==
    /\ pc[r] = "cancel" /\ (IF LooksAgain THEN Forget(r) ELSE UNCHANGED snap) /\ UNCHANGED <<row, lock, drawn, bad>>
    /\ IF With(snap[r], "active") = {} THEN Go(r, "slot") /\ UNCHANGED tx
       ELSE \E t \in With(snap[r], "active") :
            /\ ~Theirs(r, t)
            /\ IF row[t].st # "active" THEN Go(r, "slot") /\ UNCHANGED tx
               ELSE Change(r, t :> [row[t] EXCEPT !.cx = TRUE, !.flag = TRUE]) /\ Go(r, "line")
Displacing == IF LooksAgain THEN "displace view" ELSE "displace"
Line(r) == /\ pc[r] = "line" /\ Change(r, r :> New("queued")) /\ drawn' = drawn + 1 /\ Go(r, Displacing)
           /\ UNCHANGED <<row, lock, snap, bad>>
Slot(r) == /\ pc[r] = "slot" /\ ~IndexWaits(r) /\ UNCHANGED <<row, snap, bad>>
           /\ IF ~Taken(r) THEN Change(r, r :> New("active")) /\ drawn' = drawn + 1 /\ Go(r, Displacing) /\ UNCHANGED lock
              ELSE IF Restarts THEN tx' = [tx EXCEPT ![r] = Nothing] /\ lock' = lock \ {r} /\ Go(r, "come") /\ UNCHANGED drawn
              ELSE Go(r, Displacing) /\ UNCHANGED <<tx, lock, drawn>>
Waiting(r) == {q \in With(snap[r], "queued") \ {r} : row[q].st = "queued" /\ q \notin DOMAIN tx[r]}
Displace(r) ==    \* one row after another, in any order
    /\ pc[r] = "displace" /\ UNCHANGED <<row, lock, drawn, bad>>
    /\ IF Waiting(r) = {} THEN Forget(r) /\ Go(r, "displaced") /\ UNCHANGED tx
       ELSE \E q \in Waiting(r) : /\ ~Theirs(r, q) /\ Change(r, q :> [row[q] EXCEPT !.st = "ended"])
                                 /\ UNCHANGED <<pc, snap>>
Interrupts(r) == \/ Arrive(r) \/ View(r, "cancel view", "cancel") \/ CancelActive(r) \/ Line(r) \/ Slot(r)
                 \/ View(r, "displace view", "displace") \/ Displace(r) \/ Commit(r, "displaced", "in")

\* ---- settle
Settle(r) ==
    /\ pc[r] = "in" /\ row[r].st = "active" /\ ~Theirs(r, r) /\ UNCHANGED <<tx, lock, snap, drawn, bad>>
    /\ IF (row[r].flag /\ ReadsFlag) \/ row[r].cx THEN Go(r, "slow") /\ UNCHANGED row
       ELSE row' = [row EXCEPT ![r].st = "done"] /\ Go(r, "out")
Done(r) == [row[r] EXCEPT !.st = "done"]
End(r) == /\ pc[r] = "end" /\ ~Theirs(r, r) /\ Change(r, r :> Done(r)) /\ Go(r, "next view")
          /\ UNCHANGED <<row, lock, snap, drawn, bad>>
\* both in one statement: the queue is read as it was when the statement began, before it waited for the row
EndAndPromote(r) ==
    LET before == [snap[r] EXCEPT ![r].st = "done"]
        heads == IF With(before, "queued") = {} THEN {} ELSE {Oldest(before)} IN
    /\ pc[r] = "end do" /\ ~Theirs(r, r) /\ Forget(r) /\ Go(r, "next end") /\ UNCHANGED <<row, lock, drawn, bad>>
    /\ \A h \in heads : ~Theirs(r, h)
    /\ Change(r, [h \in heads |-> [row[h] EXCEPT !.st = "active", !.flag = FlagsNext]] @@ (r :> Done(r)))
Settles(r) == \/ Settle(r) \/ Locked(r, "slow", IF ThenPromotes THEN "end" ELSE "end view") \/ End(r)
              \/ View(r, "end view", "end do") \/ EndAndPromote(r)
              \/ View(r, "next view", "next do") \/ Promote(r, "next do", "next head", "next end") \/ Commit(r, "next end", "out")

Arrives(r) == Delayed(r) \/ Come(r) \/ Enter(r) \/ Behind(r) \/ Flag(r) \/ Join(r) \/ Interrupts(r)
\* where a lock is held and nobody can move, TLC finds a deadlock; where none is held everybody is done
Rest == lock = {} /\ (\A p \in Procs : DOMAIN tx[p] = {}) /\ UNCHANGED vars
Next == Rest \/ Sweep \/ (\E p \in Procs : Promotes(p)) \/ \E r \in Runs : Arrives(r) \/ Settles(r)
Spec == Init /\ [][Next]_vars
Live == /\ Spec /\ WF_vars(Sweep) /\ \A p \in Procs : WF_vars(Promotes(p))
        /\ \A r \in Runs : WF_vars(Arrives(r)) /\ SF_vars(Settles(r))

Prompt(r) == Strat[r] # "delayed"
I1 == Cardinality(With(row, "active")) <= 1
I7 == {r \in With(row, "queued") : Prompt(r)} # {} => With(row, "active") # {}
I8 == <>[](With(row, "queued") = {} /\ With(row, "active") = {})
I15 == \A r \in Runs : pc[r] \in {"in", "out"} => row[r].st # "none"
I17 == \A q, x \in Runs : (Prompt(q) /\ row[q].st = "queued" /\ row[x].st \in {"active", "done"}) => row[x].seq < row[q].seq
\* an interrupt ends all that waited before it
Displaced == \A q, x \in Runs : (Strat[x] = "interrupt" /\ x # 1 /\ row[x].st # "none" /\ row[q].seq < row[x].seq)
               => row[q].st # "queued"
SettleStands == "undone" \notin bad
=============================================================================
