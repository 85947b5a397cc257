-------------------------------- MODULE Home --------------------------------
(* One run that belongs to a session (`home_worker_id`): a process with a    *)
(* first session, perhaps a second one after it was declared dead by         *)
(* mistake, perhaps a crash, perhaps a drain; and another worker, healthy    *)
(* all the time.  Who may claim the run, and who ends it when nobody can?    *)
(* Rules O13, O26, O31, O35.  "first" and "second" are sessions of the one   *)
(* process, "other" is the worker elsewhere.                                 *)
CONSTANTS
  Policy,        \* on_orphan: "fail" or "resume"
  Able,          \* the other worker has what the run requires
  ClaimsByHome,  \* O31 a claim asks for the home
  ClaimsByAble,  \* O31 ... and for the capabilities
  EndsWaiting,   \* O31 a dead home ends what waits for it, or sets it free
  ResumeFrees,   \* O31 take over: resume clears the home
  ReHomes,       \* O13 what waits follows the process to its new session
  MovesHome,     \* O13 take back moves the home too
  Ripens,        \* O26 a final verdict on a death that is not proven waits
  DrainEnds,     \* O35 a drain ends its local runs that still wait
  SeizesAway     \* O31 a seizure asks for capabilities only, not for the home
VARIABLES proc,  \* alive, draining, drained, crashed
          sess, proven, st, own, home, started, owed, end
vars == <<proc, sess, proven, st, own, home, started, owed, end>>
Own == {"first", "second"}
All == Own \cup {"other"}
None == "none"
Init == /\ proc = "alive" /\ sess = [s \in All |-> IF s = "second" THEN "unborn" ELSE "live"] /\ proven = {}
        /\ st = "queued" /\ own = None /\ home = "first" /\ started = FALSE /\ owed = FALSE /\ end = None
Runs(s) == IF s = "other" THEN TRUE ELSE proc \in {"alive", "draining"}
Close(how) == st' = "over" /\ own' = None /\ end' = how
Same == UNCHANGED <<proc, sess, proven>>

\* ---- the process and its sessions
Suspect == /\ proc \in {"alive", "draining"} /\ sess["first"] \in {"live", "draining"} /\ sess' = [sess EXCEPT !["first"] = "dead"]
           /\ UNCHANGED <<proc, proven, st, own, home, started, owed, end>>
Reopen == /\ proc \in {"alive", "draining"} /\ sess["first"] = "dead" /\ sess["second"] = "unborn"
          /\ sess' = [sess EXCEPT !["second"] = IF proc = "alive" THEN "live" ELSE "draining"]
          /\ UNCHANGED <<proc, proven, st, own, home, started, owed, end>>
Crash == /\ proc \in {"alive", "draining"} /\ proc' = "crashed"
         /\ UNCHANGED <<sess, proven, st, own, home, started, owed, end>>
Found(s) == /\ s \in Own /\ proc = "crashed" /\ sess[s] \in {"live", "draining"} /\ sess' = [sess EXCEPT ![s] = "dead"]
            /\ UNCHANGED <<proc, proven, st, own, home, started, owed, end>>
Drain == /\ proc = "alive" /\ proc' = "draining"
         /\ sess' = [s \in All |-> IF s \in Own /\ sess[s] = "live" THEN "draining" ELSE sess[s]]
         /\ UNCHANGED <<proven, st, own, home, started, owed, end>>
\* the last thing a drain does: its session is dead, and nobody has to wait for it
Leave == \E s \in Own :
         /\ proc = "draining" /\ sess[s] = "draining" /\ own \notin Own
         /\ (DrainEnds => ~(Policy = "fail" /\ home \in Own /\ st \in {"queued", "vacant"}))
         /\ proc' = "drained" /\ sess' = [sess EXCEPT ![s] = "dead"] /\ proven' = proven \cup {s}
         /\ UNCHANGED <<st, own, home, started, owed, end>>

\* ---- the run
Promote == st = "queued" /\ st' = "vacant" /\ Same /\ UNCHANGED <<own, home, started, owed, end>>
Claim(s) == /\ st = "vacant" /\ ~owed /\ sess[s] = "live" /\ Runs(s)
            /\ (ClaimsByHome => home \in {None, s}) /\ (ClaimsByAble /\ s = "other" => Able)
            /\ st' = "held" /\ own' = s /\ Same /\ UNCHANGED <<home, started, owed, end>>
Start(s) == /\ st = "held" /\ own = s /\ ~owed /\ ~started /\ Runs(s) /\ started' = TRUE
            /\ Same /\ UNCHANGED <<st, own, home, owed, end>>
Finish(s) == /\ st = "held" /\ own = s /\ started /\ ~owed /\ Runs(s) /\ Close("success")
             /\ Same /\ UNCHANGED <<home, started, owed>>
Owe == st \in {"vacant", "held"} /\ started /\ ~owed /\ owed' = TRUE /\ Same /\ UNCHANGED <<st, own, home, started, end>>
\* the holder itself, or another when it is vacant or its owner dead; then it restores and settles
Seize(s) == /\ owed /\ st \in {"vacant", "held"} /\ Runs(s) /\ sess[s] \in {"live", "draining"}
            /\ own \in {s, None} \cup {o \in All : sess[o] = "dead"} /\ (s = "other" => Able)
            /\ (~SeizesAway => home \in {None, s})
            /\ Close("interrupted") /\ Same /\ UNCHANGED <<home, started, owed>>

\* ---- back with a new session (O13)
Moved(s) == IF s = "first" THEN "second" ELSE s
TakeBack == /\ st = "held" /\ own = "first" /\ sess["first"] = "dead" /\ sess["second"] \in {"live", "draining"} /\ Runs("second")
            /\ own' = "second" /\ home' = (IF MovesHome THEN Moved(home) ELSE home)
            /\ Same /\ UNCHANGED <<st, started, owed, end>>
ReHome == /\ ReHomes /\ st \in {"queued", "vacant"} /\ home = "first" /\ sess["first"] = "dead"
          /\ sess["second"] \in {"live", "draining"} /\ Runs("second") /\ home' = "second"
          /\ Same /\ UNCHANGED <<st, own, started, owed, end>>

\* ---- drain (O35)
EndWaiting(s) == /\ DrainEnds /\ Policy = "fail" /\ st \in {"queued", "vacant"} /\ ~owed /\ home = s /\ sess[s] = "draining" /\ Runs(s)
                 /\ Close("shutdown") /\ Same /\ UNCHANGED <<home, started, owed>>
DrainHeld(s) == /\ st = "held" /\ own = s /\ sess[s] = "draining" /\ ~owed /\ Runs(s)
                /\ IF Policy = "fail" THEN Close("shutdown") ELSE st' = "vacant" /\ own' = None /\ UNCHANGED end
                /\ Same /\ UNCHANGED <<home, started, owed>>

\* ---- the other worker's sweep (O26, O31)
\* one lease after the verdict a live process has its new session and has asked for what is its own
Back == sess["second"] # "unborn" /\ own # "first" /\ (ReHomes => home # "first")
Ripe(s) == s \in proven \/ ~Ripens \/ proc \in {"crashed", "drained"} \/ Back
Lost(s) == s # None /\ sess[s] = "dead"
TakeOverFail == /\ ~owed /\ Policy = "fail"
                /\ \/ st = "held" /\ Lost(own) /\ Ripe(own)
                   \/ EndsWaiting /\ st \in {"queued", "vacant"} /\ Lost(home) /\ Ripe(home)
                /\ Close("orphan") /\ Same /\ UNCHANGED <<home, started, owed>>
TakeOverResume == /\ ~owed /\ Policy = "resume"
                  /\ \/ st = "held" /\ Lost(own) /\ st' = "vacant" /\ own' = None
                     \/ EndsWaiting /\ st \in {"queued", "vacant"} /\ Lost(home) /\ UNCHANGED <<st, own>>
                  /\ home' = (IF ResumeFrees THEN None ELSE home) /\ Same /\ UNCHANGED <<started, owed, end>>

Next == \/ Suspect \/ Reopen \/ Crash \/ Drain \/ Leave \/ Promote \/ Owe \/ TakeBack \/ ReHome \/ TakeOverFail \/ TakeOverResume
        \/ \E s \in All : Found(s) \/ Claim(s) \/ Start(s) \/ Finish(s) \/ Seize(s) \/ EndWaiting(s) \/ DrainHeld(s)
Fair == /\ WF_vars(Promote) /\ WF_vars(Reopen) /\ WF_vars(TakeBack) /\ WF_vars(ReHome) /\ WF_vars(Leave)
        /\ WF_vars(TakeOverFail) /\ WF_vars(TakeOverResume)
        /\ \A s \in All : /\ WF_vars(Found(s)) /\ WF_vars(Claim(s)) /\ WF_vars(Start(s)) /\ WF_vars(Finish(s))
                          /\ WF_vars(Seize(s)) /\ WF_vars(EndWaiting(s)) /\ WF_vars(DrainHeld(s))
Spec == Init /\ [][Next]_vars /\ Fair

I8 == <>(st = "over")
\* where nobody else is able: failing needs no ability, but a restore waits for somebody who can do it
I8Unable == <>(st = "over" \/ owed)
\* whoever holds it is its home, and can run it
HeldAtHome == st = "held" /\ own # None => home \in {None, own} /\ (own = "other" => Able)
\* what a drain put aside is not called an orphan
DrainSaysShutdown == end = "orphan" => proc # "drained"
\* a process that lives, or has only just been taken for dead, keeps its runs
LiveSpared == end = "orphan" => proc = "crashed"
=============================================================================
